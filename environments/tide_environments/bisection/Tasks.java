import java.util.HashMap;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;

/**
 * The contract's calls over the table of tasks. All state of all tasks is read and changed under this object's monitor;
 * `await` lets go of it. Game code runs outside, in a thread of each task.
 */
class Tasks {
    static final String NAME = "bisection";
    static final long KEEP_NANOS = 600_000_000_000L; // a task's record stays for ten minutes after it was let go
    static final int KEEP_TASKS = 4096;
    static final long LAST_ACTIONS_NANOS = 1_000_000_000L, LAST_ANSWERS_NANOS = 400_000_000L; // a gateway waits for 2 s

    final int capacity;
    final String incarnation = UUID.randomUUID().toString().replace("-", "");

    private final Map<String, Task> byId = new LinkedHashMap<>(); // the oldest first
    private final Map<String, Task> newest = new HashMap<>(); // by key: the newest attempt
    private int callsUnderWay = 0;
    private boolean stopping = false, givingUp = false;

    Tasks(int capacity) {
        this.capacity = capacity;
    }

    synchronized Answer start(Map<String, Object> body) throws InterruptedException {
        String key = (String) body.get("key");
        long attempt = (Long) body.get("attempt");
        Task older = newest.get(key);
        if (older != null) older.check();
        if (older != null && older.startFailed && attempt >= older.attempt) older = null;
        if (older != null && attempt < older.attempt)
            return Answer.problem("stale_attempt", "a higher attempt of this key exists: " + older.attempt);
        if (older != null && attempt == older.attempt) {
            if (!Json.same(body, older.body))
                return Answer.problem("key_conflict", "key: it was used for a start with another body", "field", "key");
            while (older.startAnswer == null) await();
            return older.startAnswer;
        }
        long held = held() - (older != null && older.place ? 1 : 0);
        if (held >= capacity) {
            String words = "all " + capacity + " places are taken; call again";
            return Answer.problem("capacity", words, "reason", "capacity", "retry_after_s", 1.0);
        }
        Task task = new Task(this, body);
        byId.put(task.id, task);
        newest.put(key, task);
        if (older != null) {
            older.superseded = true;
            older.place = false; // the new attempt has it
            Answer replaced = Answer.problem("ended", "a higher attempt has replaced the task");
            if (older.open()) older.beginEnd("aborted", null, "superseded", replaced);
            while (older.state != State.ended) await();
        }
        if (task.state == State.starting) task.begin();
        while (task.startAnswer == null) await();
        return task.startAnswer;
    }

    synchronized Answer act(Map<String, Object> body) throws InterruptedException {
        Task task = find(body.get("task_id"));
        long turn = (Long) body.get("turn");
        Map<?, ?> message = (Map<?, ?>) body.get("message");
        Turn record = task.record;
        if (record != null && record.number == turn) {
            if (!Json.same(message, record.message))
                return Answer.problem("turn_conflict", "turn " + turn + " was taken with another message");
            if (record.answer != null) return record.later;
            while (record.answer == null) await();
            return record.answer;
        }
        if (task.superseded) return Answer.problem("stale_attempt", "a higher attempt of this key exists");
        if (task.over()) return task.gone();
        if (task.state == State.done)
            return Answer.problem("state_conflict", "the environment has ended the task; read the account with /end");
        boolean acting = task.state == State.acting || task.state == State.pausing;
        if (acting || turn != task.turn)
            return Answer.problem("turn_order", "the next turn is " + (acting ? task.turn + 1 : task.turn));
        if (task.state == State.paused)
            return Answer.problem("paused", "the task is paused; wait until it is resumed", "retry_after_s", 0.5);
        if (task.state == State.starting) return Answer.problem("state_conflict", "the task is still starting");
        Turn mine = new Turn(turn, message);
        task.act(mine);
        while (mine.answer == null) await();
        return mine.answer;
    }

    synchronized Answer look(String taskId) {
        Task task = find(taskId);
        if (task.over()) return task.gone();
        if (task.lastStep == null) return Answer.problem("state_conflict", "the task is still starting");
        return new Answer(200, task.observation());
    }

    synchronized Answer pauseOrResume(Map<String, Object> body, boolean pause) {
        Task task = find(body.get("task_id"));
        if (task.over()) return task.gone();
        Long epoch = (Long) body.get("epoch");
        if (epoch == null || epoch > task.epoch) {
            if (epoch != null) task.epoch = epoch;
            if (pause && task.state == State.waiting) task.state = State.paused;
            else if (pause && task.state == State.acting) task.state = State.pausing;
            else if (!pause && task.state == State.paused) task.state = State.waiting;
            else if (!pause && task.state == State.pausing) task.state = State.acting;
        }
        return new Answer(200, Json.object("state", task.state.name(), "epoch", task.epoch, "clocks", task.clocks()));
    }

    synchronized Answer end(Map<String, Object> body) throws InterruptedException {
        Task task = find(body.get("task_id"));
        Answer waiting = Answer.problem("ended", "the task was ended by its caller");
        if (task.open()) task.beginEnd("aborted", null, (String) body.get("reason"), waiting);
        while (task.account == null) await();
        return task.account;
    }

    synchronized Answer health() {
        Map<String, Object> body = Json.object("contract", 1L, "environment", NAME, "capacity", (long) capacity);
        body.putAll(Json.object("tasks", held(), "incarnation", incarnation));
        return new Answer(200, body);
    }

    private Task find(Object taskId) {
        Task task = byId.get((String) taskId);
        if (task == null) throw new Refusal(Answer.problem("not_found", "task_id: no such task", "field", "task_id"));
        task.check();
        return task;
    }

    private long held() {
        return byId.values().stream().filter(task -> task.place).count();
    }

    /** Waits for a change of anything; every loop around it asks whether it was the change it waits for. */
    private void await() throws InterruptedException {
        if (givingUp) throw new Refusal(Answer.problem("unavailable", "the server stops"));
        wait();
    }

    /** Sees clocks that ran out while nobody called, and forgets tasks that were let go long ago. */
    synchronized void tick() {
        long now = System.nanoTime();
        int kept = 0;
        for (Task task : byId.values()) {
            task.check();
            if (!task.place) kept++;
        }
        for (Iterator<Task> all = byId.values().iterator(); all.hasNext(); ) {
            Task task = all.next();
            boolean busy = task.place || task.startAnswer == null || task.worker != null && task.state != State.ended;
            if (!busy && (kept > KEEP_TASKS || now - task.letGoAt > KEEP_NANOS)) {
                all.remove();
                newest.remove(task.key, task);
                kept--;
            }
        }
    }

    /** Counts a call in. */
    synchronized void enter() {
        callsUnderWay++;
    }

    /** Counts a call out, once its answer has been sent. */
    synchronized void leave() {
        callsUnderWay--;
        notifyAll();
    }

    synchronized void refuseIfStopping() {
        if (stopping) throw new Refusal(Answer.problem("unavailable", "the server stops"));
    }

    /** No new calls; actions under way get a second, then calls that still wait are answered with 503. */
    synchronized void stop() throws InterruptedException {
        stopping = true;
        waitForCalls(LAST_ACTIONS_NANOS);
        givingUp = true;
        notifyAll();
        waitForCalls(LAST_ANSWERS_NANOS);
    }

    private void waitForCalls(long nanos) throws InterruptedException {
        long until = System.nanoTime() + nanos;
        while (callsUnderWay > 0 && System.nanoTime() < until) wait(50);
    }
}
