import java.util.HashMap;
import java.util.Map;

/** A status and a JSON body. */
class Answer {
    private record Code(int status, String title) {}

    private static final Map<String, Code> CODES = new HashMap<>();

    static {
        code("not_found", 404, "No such task");
        code("method_not_allowed", 405, "The endpoint does not take this method");
        code("turn_conflict", 409, "The turn was already taken with another message");
        code("turn_order", 409, "The turn is out of order");
        code("key_conflict", 409, "The key was already used for another start");
        code("stale_attempt", 409, "A higher attempt of this key exists");
        code("state_conflict", 409, "The task's state does not allow this call");
        code("expired", 410, "A clock of the task has expired");
        code("ended", 410, "The task has ended");
        code("too_large", 413, "The body is too large");
        code("media_type", 415, "The body must be application/json");
        code("invalid", 422, "The request is not valid");
        code("paused", 423, "The task is paused");
        code("capacity", 429, "No capacity now");
        code("internal", 500, "Unexpected failure in the server");
        code("environment_failed", 502, "The environment failed");
        code("unavailable", 503, "The server cannot serve now");
        code("turn_expired", 504, "The turn's clock expired while the environment acted");
    }

    private static void code(String code, int status, String title) {
        CODES.put(code, new Code(status, title));
    }

    final int status;
    final Map<String, Object> body;

    Answer(int status, Map<String, Object> body) {
        this.status = status;
        this.body = body;
    }

    /** An error as problem+json; `more` are further names and values. */
    static Answer problem(String code, String detail, Object... more) {
        Code known = CODES.get(code);
        Map<String, Object> body = Json.object("type", "urn:tide:problem:" + code, "title", known.title);
        body.putAll(Json.object("status", (long) known.status, "code", code, "detail", detail));
        body.putAll(Json.object(more));
        return new Answer(known.status, body);
    }
}
