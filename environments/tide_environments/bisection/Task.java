import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;

/**
 * One episode: its state, its clocks, and the record of its last turn. All of it is read and changed under the monitor
 * of `tasks`, but `game`, which belongs to the worker while there is one.
 */
class Task {
    static final double[] LIMITS = {30, 600, 60, 3600, 10}; // where the start names none

    final Tasks tasks;
    final String id = UUID.randomUUID().toString();
    final Map<String, Object> body;
    final String key;
    final long attempt;
    final double[] limit = LIMITS.clone(), consumed = new double[5];
    State state = State.starting;
    boolean place = true, superseded = false, startFailed = false;
    long turn = 0, epoch = 0, countedUntil = System.nanoTime(), letGoAt = 0;
    double reward = 0;
    Map<String, Object> metrics = new LinkedHashMap<>(), outcome;
    Game game;
    Thread worker; // runs code of the environment now
    Turn record;
    Step lastStep;
    Answer startAnswer, account;

    Task(Tasks tasks, Map<String, Object> body) {
        this.tasks = tasks;
        this.body = body;
        key = (String) body.get("key");
        attempt = (Long) body.get("attempt");
        if (body.get("limits") instanceof Map<?, ?> limits)
            for (Clock clock : Clock.values())
                if (limits.get(clock.name()) instanceof Number seconds) limit[clock.ordinal()] = seconds.doubleValue();
    }

    boolean over() {
        return state == State.ending || state == State.ended;
    }

    boolean open() {
        return !over();
    }

    /** Brings the clocks up to now, and ends the task where one has run out. Comes before every change of the state. */
    void check() {
        long now = System.nanoTime();
        Clock expired = null;
        for (Clock clock : Clock.values()) {
            if (!clock.runsIn(state)) continue;
            consumed[clock.ordinal()] += (now - countedUntil) / 1e9;
            if (expired == null && consumed[clock.ordinal()] >= limit[clock.ordinal()]) expired = clock;
        }
        countedUntil = now;
        if (expired == null) return;
        if (expired == Clock.end) letGo(false);
        else beginEnd("expired", expired, null, null);
    }

    void restartTurnClocks() {
        consumed[Clock.idle.ordinal()] = consumed[Clock.turn.ordinal()] = 0;
    }

    Map<String, Object> clocks() {
        Map<String, Object> clocks = new LinkedHashMap<>();
        for (Clock clock : Clock.values()) {
            double most = limit[clock.ordinal()], used = consumed[clock.ordinal()];
            double left = Math.max(0, most - used);
            clocks.put(clock.name(), Json.object("limit_s", most, "consumed_s", used, "remaining_s", left));
        }
        return clocks;
    }

    Map<String, Object> limits() {
        Map<String, Object> limits = new LinkedHashMap<>();
        for (Clock clock : Clock.values()) limits.put(clock.name(), limit[clock.ordinal()]);
        return limits;
    }

    Map<String, Object> observation() {
        Map<String, Object> body = Json.object("turn", turn, "messages", lastStep.messages());
        body.putAll(Json.object("reward", lastStep.reward(), "terminated", lastStep.terminated()));
        body.putAll(Json.object("truncated", lastStep.truncated(), "info", lastStep.info(), "clocks", clocks()));
        return body;
    }

    /** Makes the game, in a thread of its own; `started` comes with it or with what went wrong. */
    void begin() {
        work(() -> {
            Game game = null;
            Answer failure = null;
            try {
                game = new Game((Map<?, ?>) body.get("task"), (Long) body.get("seed"));
            } catch (Refusal refusal) {
                failure = refusal.answer;
            } catch (Exception error) {
                failure = Answer.problem("environment_failed", "the environment could not start: " + error);
            }
            started(game, failure);
        });
    }

    /** Plays a turn, in a thread of its own; it goes on when its caller goes away. `acted` comes with what it gave. */
    void act(Turn turn) {
        record = turn;
        restartTurnClocks();
        state = State.acting;
        work(() -> {
            Step step = null;
            Answer failure = null;
            try {
                step = game.act(turn.message);
            } catch (Exception error) {
                failure = Answer.problem("environment_failed", "the environment failed: " + error);
            }
            acted(step, failure);
        });
    }

    private void work(Runnable code) {
        worker = new Thread(code);
        worker.setDaemon(true);
        worker.start();
    }

    /** The environment's start has come back, with a game or with a failure. */
    void started(Game game, Answer failure) {
        synchronized (tasks) {
            if (Thread.currentThread() != worker) return; // let go before
            check();
            worker = null;
            this.game = game;
            if (over()) {
                letGo(true);
            } else if (failure != null) {
                beginEnd("failed", null, "environment_failed", failure);
            } else {
                lastStep = new Step(game.opening(), null, false, false, Map.of());
                state = State.waiting;
                Map<String, Object> answer = Json.object("task_id", id, "turn", 0L, "messages", lastStep.messages());
                answer.putAll(Json.object("tools", List.of(), "limits", limits(), "clocks", clocks()));
                startAnswer = new Answer(201, answer);
            }
            tasks.notifyAll();
        }
    }

    /** The environment has acted. */
    void acted(Step step, Answer failure) {
        synchronized (tasks) {
            if (Thread.currentThread() != worker) return;
            check();
            worker = null;
            if (over()) {
                letGo(true);
            } else if (failure != null) {
                beginEnd("failed", null, "environment_failed", failure);
            } else {
                lastStep = step;
                turn++;
                if (step.reward() != null) reward += step.reward();
                restartTurnClocks();
                if (step.terminated() || step.truncated()) {
                    state = State.done;
                    metrics = game.metrics();
                    giveBack();
                } else {
                    state = state == State.pausing ? State.paused : State.waiting;
                }
                record.answer = record.later = new Answer(200, observation());
            }
            tasks.notifyAll();
        }
    }

    /** The answer to calls about a task that is over. */
    Answer gone() {
        Object clock = outcome.get("clock");
        if (clock != null)
            return Answer.problem("expired", "the " + clock + " clock has expired; read /end", "clock", clock);
        return Answer.problem("ended", "the task has ended (" + outcome.get("kind") + "); read the account with /end");
    }

    /** Ends an open task. `waiting` is for calls that wait now (null: what gone() says). */
    void beginEnd(String kind, Clock clock, String reason, Answer waiting) {
        if (state == State.done) {
            kind = lastStep.terminated() ? "completed" : "truncated";
            reason = null;
        }
        outcome = Json.object("kind", kind, "clock", clock == null ? null : clock.name(), "reason", reason);
        if (waiting == null) waiting = gone();
        if (startAnswer == null) {
            startAnswer = waiting;
            startFailed = !kind.equals("aborted");
        }
        if (record != null && record.answer == null) {
            record.answer = record.later = waiting;
            if (clock == Clock.turn) {
                String words = "the environment took longer than the turn clock allows";
                record.answer = Answer.problem("turn_expired", words, "clock", "turn");
            }
        }
        state = State.ending;
        if (worker == null) letGo(true);
        else worker.interrupt(); // letGo comes with its answer, or when the end clock runs out
        tasks.notifyAll();
    }

    void letGo(boolean inTime) {
        Object clock = outcome.get("clock");
        boolean failed = outcome.get("kind").equals("failed") || "start".equals(clock) || "turn".equals(clock);
        if (inTime && game != null) metrics = game.metrics();
        state = State.ended;
        worker = null;
        Map<String, Object> answer = Json.object("reward", failed || !inTime ? null : reward, "metrics", metrics);
        answer.putAll(Json.object("turns", turn, "clocks", clocks(), "outcome", outcome));
        account = new Answer(200, answer);
        giveBack();
        tasks.notifyAll();
    }

    void giveBack() {
        place = false;
        if (letGoAt == 0) letGoAt = System.nanoTime();
    }
}
