import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;

/**
 * JSON in and out, strictly. Objects are Map, arrays List; whole numbers Long (BigInteger from 2^63 to 2^64), all
 * others Double; strings, Boolean and null.
 */
class Json {
    static final int LEVELS = 250;
    static final BigInteger MOST = BigInteger.ONE.shiftLeft(64);

    private final String text;
    private int at = 0;

    private Json(String text) {
        this.text = text;
    }

    static Object parse(byte[] bytes) {
        String text;
        try {
            // A decoder of its own refuses malformed UTF-8; String's constructor does not.
            text = StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(bytes)).toString();
        } catch (CharacterCodingException error) {
            throw Request.invalid("body", "must be UTF-8");
        }
        Json parser = new Json(text);
        Object value = parser.value(1);
        parser.space();
        if (parser.at < text.length()) throw parser.wrong("text after the end");
        return value;
    }

    private Refusal wrong(String what) {
        return Request.invalid("body", "not valid JSON at character " + at + ": " + what);
    }

    private void space() {
        while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) at++;
    }

    private char peek() {
        if (at >= text.length()) throw wrong("it ends early");
        return text.charAt(at);
    }

    private boolean take(char c) {
        space();
        if (peek() != c) return false;
        at++;
        return true;
    }

    private void expect(char c) {
        if (!take(c)) throw wrong("expected " + c);
    }

    private Object value(int level) {
        if (level > LEVELS + 1) throw Request.invalid("body", "at most " + LEVELS + " levels");
        space();
        char c = peek();
        if (level > LEVELS && (c == '{' || c == '[')) throw Request.invalid("body", "at most " + LEVELS + " levels");
        if (c == '{') {
            Map<String, Object> map = new LinkedHashMap<>();
            at++;
            if (take('}')) return map;
            do {
                space();
                String name = string();
                expect(':');
                map.put(name, value(level + 1));
            } while (take(','));
            expect('}');
            return map;
        }
        if (c == '[') {
            List<Object> list = new ArrayList<>();
            at++;
            if (take(']')) return list;
            do list.add(value(level + 1)); while (take(','));
            expect(']');
            return list;
        }
        if (c == '"') return string();
        if (c == '-' || c >= '0' && c <= '9') return number();
        if (text.startsWith("true", at)) return literal("true", true);
        if (text.startsWith("false", at)) return literal("false", false);
        if (text.startsWith("null", at)) return literal("null", null);
        throw wrong("no value begins like this");
    }

    private Object literal(String word, Object value) {
        at += word.length();
        return value;
    }

    private int digits() {
        int from = at;
        while (at < text.length() && text.charAt(at) >= '0' && text.charAt(at) <= '9') at++;
        if (at == from) throw wrong("expected a digit");
        return at - from;
    }

    private Number number() {
        int from = at;
        if (peek() == '-') at++;
        if (peek() == '0') at++;
        else digits();
        boolean whole = true;
        if (at < text.length() && text.charAt(at) == '.') {
            at++;
            digits();
            whole = false;
        }
        if (at < text.length() && (text.charAt(at) == 'e' || text.charAt(at) == 'E')) {
            at++;
            if (peek() == '+' || peek() == '-') at++;
            digits();
            whole = false;
        }
        String token = text.substring(from, at);
        if (whole && token.length() <= 21) {
            BigInteger exact = new BigInteger(token);
            if (exact.bitLength() < 64) return exact.longValue();
            if (exact.signum() > 0 && exact.compareTo(MOST) < 0) return exact;
        }
        double value = Double.parseDouble(token);
        if (Double.isInfinite(value)) throw wrong("the number is beyond a double");
        return value;
    }

    private String string() {
        if (peek() != '"') throw wrong("expected a string");
        at++;
        StringBuilder out = new StringBuilder();
        while (true) {
            char c = peek();
            at++;
            if (c == '"') break;
            if (c < 0x20) throw wrong("a control character in a string");
            if (c != '\\') {
                out.append(c);
                continue;
            }
            char escape = peek();
            at++;
            int known = "\"\\/bfnrt".indexOf(escape);
            if (known >= 0) {
                out.append("\"\\/\b\f\n\r\t".charAt(known));
            } else if (escape == 'u') {
                if (at + 4 > text.length()) throw wrong("it ends early");
                int code = 0;
                for (int i = 0; i < 4; i++, at++) {
                    char hex = text.charAt(at);
                    int digit = hex < 128 ? Character.digit(hex, 16) : -1;
                    if (digit < 0) throw wrong("expected four hex digits");
                    code = code * 16 + digit;
                }
                out.append((char) code);
            } else {
                throw wrong("an unknown escape");
            }
        }
        for (int i = 0; i < out.length(); i++) {
            if (!Character.isSurrogate(out.charAt(i))) continue;
            if (i + 1 < out.length() && Character.isSurrogatePair(out.charAt(i), out.charAt(i + 1))) i++;
            else throw wrong("half a surrogate pair");
        }
        return out.toString();
    }

    static String write(Object value) {
        StringBuilder out = new StringBuilder();
        write(value, out);
        return out.toString();
    }

    private static void write(Object value, StringBuilder out) {
        String between = "";
        if (value instanceof Map<?, ?> map) {
            out.append('{');
            for (var entry : map.entrySet()) {
                out.append(between);
                write(entry.getKey(), out);
                out.append(':');
                write(entry.getValue(), out);
                between = ",";
            }
            out.append('}');
        } else if (value instanceof List<?> list) {
            out.append('[');
            for (Object item : list) {
                out.append(between);
                write(item, out);
                between = ",";
            }
            out.append(']');
        } else if (value instanceof String text) {
            out.append('"');
            for (int i = 0; i < text.length(); i++) {
                char c = text.charAt(i);
                if (c == '"' || c == '\\') out.append('\\').append(c);
                else if (c < 0x20) out.append(String.format("\\u%04x", (int) c));
                else out.append(c);
            }
            out.append('"');
        } else {
            out.append(value);
        }
    }

    /** Equality as parsed JSON: 1 equals 1.0, and an absent field is not a null one. */
    static boolean same(Object a, Object b) {
        if (a instanceof Number x && b instanceof Number y) return exact(x).compareTo(exact(y)) == 0;
        if (a instanceof Map<?, ?> x && b instanceof Map<?, ?> y)
            return x.keySet().equals(y.keySet())
                    && x.keySet().stream().allMatch(name -> same(x.get(name), y.get(name)));
        if (a instanceof List<?> x && b instanceof List<?> y) {
            if (x.size() != y.size()) return false;
            for (int i = 0; i < x.size(); i++) if (!same(x.get(i), y.get(i))) return false;
            return true;
        }
        return Objects.equals(a, b);
    }

    private static BigDecimal exact(Number number) {
        return number instanceof Double value ? new BigDecimal(value) : new BigDecimal(number.toString());
    }

    static int levels(Object value) {
        Collection<?> inner;
        if (value instanceof Map<?, ?> map) inner = map.values();
        else if (value instanceof List<?> list) inner = list;
        else return 0;
        int most = 0;
        for (Object item : inner) most = Math.max(most, levels(item));
        return most + 1;
    }

    static Map<String, Object> object(Object... namesAndValues) {
        Map<String, Object> map = new LinkedHashMap<>();
        for (int i = 0; i < namesAndValues.length; i += 2) map.put((String) namesAndValues[i], namesAndValues[i + 1]);
        return map;
    }
}
