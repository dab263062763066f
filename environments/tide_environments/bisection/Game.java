import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Random;

/**
 * The environment: a secret number from 1 to `highest`; a guess is answered with higher or lower. "hint" asks an oracle
 * that thinks for a second and costs a guess too; "give up" ends the game. Found: 1, else 0. Replies that are none of
 * these cost no guess, but 40 turns are all.
 */
class Game {
    static final int TURNS = 40;
    final long highest, guesses, secret;
    long used = 0, turns = 0;
    boolean solved = false;

    Game(Map<?, ?> task, Long seed) {
        Map<?, ?> given = task == null ? Map.of() : task;
        for (Object name : given.keySet())
            if (!name.equals("highest") && !name.equals("guesses"))
                throw Request.invalid("task." + name, "unknown parameter; there are highest and guesses");
        highest = parameter(given, "highest", 1000, 2, 1_000_000_000);
        guesses = parameter(given, "guesses", 12, 1, 100);
        Random random = seed == null ? new Random() : new Random(seed);
        secret = 1 + Math.floorMod(random.nextLong(), highest);
    }

    private static long parameter(Map<?, ?> given, String name, long fallback, long least, long most) {
        return given.containsKey(name) ? Request.whole(given.get(name), "task." + name, least, most) : fallback;
    }

    List<Object> opening() {
        String words = "I think of a whole number from 1 to " + highest + ". You have " + guesses + " guesses.";
        return say(words + " Reply with a number, \"hint\" or \"give up\".");
    }

    Step act(Map<?, ?> message) throws InterruptedException {
        turns++;
        String text = text(message.get("content")).strip().toLowerCase(Locale.ROOT);
        String answer;
        boolean over = false;
        if (text.equals("give up")) {
            answer = "It was " + secret + ".";
            over = true;
        } else if (text.equals("hint")) {
            Thread.sleep(1000);
            used++;
            answer = "The number is " + (secret % 2 == 0 ? "even." : "odd.");
        } else if (text.matches("[0-9]{1,10}")) {
            long guess = Long.parseLong(text);
            used++;
            solved = guess == secret;
            answer = solved ? "Found!" : guess < secret ? "Higher than " + guess + "." : "Lower than " + guess + ".";
        } else {
            answer = "I do not understand that. Reply with a number, \"hint\" or \"give up\" and nothing else.";
        }
        over |= solved || used >= guesses;
        boolean truncated = !over && turns >= TURNS;
        if (!over) answer += " Guesses left: " + (guesses - used) + ".";
        List<Object> messages = new ArrayList<>();
        if (message.get("tool_calls") instanceof List<?> calls) // a chat with unanswered tool calls is not valid
            for (Object call : calls)
                if (((Map<?, ?>) call).get("id") instanceof String id)
                    messages.add(Json.object("role", "tool", "tool_call_id", id, "content", "There are no tools."));
        messages.addAll(say(answer));
        return new Step(messages, solved ? 1.0 : 0.0, over, truncated, Json.object("guesses_left", guesses - used));
    }

    Map<String, Object> metrics() {
        return Json.object("solved", solved, "guesses", used);
    }

    static List<Object> say(String text) {
        return List.of(Json.object("role", "user", "content", text));
    }

    /** The text of a message's content: a string, a list of parts, or null. */
    static String text(Object content) {
        if (content instanceof String text) return text;
        StringBuilder all = new StringBuilder();
        if (content instanceof List<?> parts)
            for (Object part : parts)
                if (((Map<?, ?>) part).get("text") instanceof String text) all.append(text);
        return all.toString();
    }
}
