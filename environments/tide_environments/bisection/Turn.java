import java.util.Map;

/** The last turn: its message and, once it has ended, its answer. `later` is for calls that come after it went out. */
class Turn {
    final long number;
    final Map<?, ?> message;
    Answer answer, later;

    Turn(long number, Map<?, ?> message) {
        this.number = number;
        this.message = message;
    }
}
