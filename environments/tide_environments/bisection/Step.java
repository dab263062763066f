import java.util.List;
import java.util.Map;

/** What the environment answers to an action. */
record Step(List<Object> messages, Double reward, boolean terminated, boolean truncated, Map<String, Object> info) {}
