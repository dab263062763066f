/** The five clocks of a task, with the contract's names. */
enum Clock {
    start, idle, turn, active, end;

    boolean runsIn(State state) {
        return switch (this) {
            case start -> state == State.starting;
            case idle -> state == State.waiting;
            case turn -> state == State.acting || state == State.pausing;
            case active -> state == State.waiting || state == State.acting || state == State.pausing;
            case end -> state == State.ending;
        };
    }
}
