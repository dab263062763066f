import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Checks of the request bodies. Each returns the body with the defaults of absent fields filled in. */
class Request {
    static Refusal invalid(String field, String fix) {
        return new Refusal(Answer.problem("invalid", field + ": " + fix, "field", field));
    }

    static Map<String, Object> start(Map<String, Object> body) {
        fields(body, "", List.of("environment", "key"), "task", "seed", "split", "kind", "limits", "attempt");
        Map<String, Object> full = new LinkedHashMap<>();
        full.put("environment", word(body.get("environment"), "environment", 1, 128));
        full.put("key", word(body.get("key"), "key", 1, 512));
        Object task = body.get("task"), split = body.get("split"), limits = body.get("limits");
        if (task != null && Json.levels(object(task, "task")) > 1 + 64) throw invalid("task", "at most 64 levels");
        if (task != null && Json.write(task).getBytes(StandardCharsets.UTF_8).length > 4 * Server.MIB)
            throw new Refusal(Answer.problem("too_large", "task: at most 4 MiB", "field", "task"));
        full.put("task", task);
        full.put("seed", body.get("seed") == null ? null : whole(body.get("seed"), "seed", 0, Long.MAX_VALUE));
        full.put("split", split == null ? null : word(split, "split", 0, 64));
        full.put("kind", body.getOrDefault("kind", "train"));
        if (!"train".equals(full.get("kind")) && !"eval".equals(full.get("kind")))
            throw invalid("kind", "must be one of: train, eval");
        if (limits != null) {
            Map<String, Object> named = object(limits, "limits");
            fields(named, "limits.", List.of(), "start", "idle", "turn", "active", "end");
            named.forEach((name, value) -> {
                if (!(value instanceof Number number) || !(number.doubleValue() > 0 && number.doubleValue() <= 2592000))
                    throw invalid("limits." + name, "must be a number above 0 and at most 2592000");
            });
        }
        full.put("limits", limits);
        full.put("attempt", whole(body.getOrDefault("attempt", 0L), "attempt", 0, Integer.MAX_VALUE));
        return full;
    }

    static Map<String, Object> action(Map<String, Object> body) {
        fields(body, "", List.of("task_id", "turn", "message"));
        word(body.get("task_id"), "task_id", 1, 128);
        whole(body.get("turn"), "turn", 0, Integer.MAX_VALUE);
        Map<String, Object> message = object(body.get("message"), "message");
        if (!"assistant".equals(message.get("role"))) throw invalid("message.role", "must be one of: assistant");
        if (!(message.get("content") instanceof String)) objects(message.get("content"), "message.content");
        objects(message.get("tool_calls"), "message.tool_calls");
        if (message.get("tool_call_id") != null) text(message.get("tool_call_id"), "message.tool_call_id", 0, 512);
        return body;
    }

    static Map<String, Object> epoch(Map<String, Object> body) {
        fields(body, "", List.of("task_id"), "epoch");
        word(body.get("task_id"), "task_id", 1, 128);
        if (body.get("epoch") != null) whole(body.get("epoch"), "epoch", 1, Long.MAX_VALUE);
        return body;
    }

    static Map<String, Object> end(Map<String, Object> body) {
        fields(body, "", List.of("task_id"), "reason");
        word(body.get("task_id"), "task_id", 1, 128);
        if (body.get("reason") != null && text(body.get("reason"), "reason", 0, 1024).indexOf(0) >= 0)
            throw invalid("reason", "must hold no NUL");
        return body;
    }

    static String query(String raw) {
        String taskId = null;
        for (String pair : raw == null || raw.isEmpty() ? new String[0] : raw.split("&")) {
            String[] parts = pair.split("=", 2);
            if (!parts[0].equals("task_id")) throw invalid(parts[0], "unknown parameter; there is task_id");
            if (taskId != null) throw invalid("task_id", "give it once");
            try {
                taskId = parts.length < 2 ? "" : URLDecoder.decode(parts[1], StandardCharsets.UTF_8);
            } catch (IllegalArgumentException error) {
                throw invalid("task_id", "a broken escape: " + error.getMessage());
            }
        }
        if (taskId == null) throw invalid("task_id", "is missing");
        return word(taskId, "task_id", 1, 128);
    }

    static void fields(Map<String, Object> body, String prefix, List<String> required, String... optional) {
        for (String name : body.keySet())
            if (!required.contains(name) && !List.of(optional).contains(name))
                throw invalid(prefix + name, "unknown field, remove it");
        for (String name : required)
            if (!body.containsKey(name)) throw invalid(prefix + name, "is missing");
    }

    @SuppressWarnings("unchecked")
    static Map<String, Object> object(Object value, String field) {
        if (value instanceof Map) return (Map<String, Object>) value;
        throw invalid(field, "must be an object");
    }

    static void objects(Object value, String field) {
        if (value == null) return;
        if (!(value instanceof List<?> list)) throw invalid(field, "must be a list of objects or null");
        if (list.size() > 1024) throw invalid(field, "at most 1024 items");
        for (int i = 0; i < list.size(); i++) object(list.get(i), field + "." + i);
    }

    static long whole(Object value, String field, long least, long most) {
        if (value instanceof Long number && number >= least && number <= most) return number;
        throw invalid(field, "must be a whole number from " + least + " to " + most);
    }

    static String text(Object value, String field, int least, int most) {
        if (!(value instanceof String text)) throw invalid(field, "must be a string");
        int length = text.codePointCount(0, text.length());
        if (length < least || length > most) throw invalid(field, "must have " + least + " to " + most + " characters");
        return text;
    }

    static String word(Object value, String field, int least, int most) {
        String text = text(value, field, least, most);
        if (text.chars().anyMatch(c -> c < 0x20 || c == 0x7f)) throw invalid(field, "must hold no control characters");
        return text;
    }
}
