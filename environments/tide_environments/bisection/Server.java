import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.io.InputStream;
import java.net.BindException;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Executors;

/**
 * An environment server of the wire contract, version 1: the command line, and HTTP.
 *
 * <p>request -> route -> body (bounded) -> Json -> checked fields (Request) -> Tasks -> Task -> Game -> Answer
 */
public class Server {
    static final int MIB = 1 << 20;
    static final int MAX_SMALL_BODY_BYTES = 64 * 1024;
    static final int MAX_DRAINED_MIB = 64;
    static final int SWEEP_EVERY_MS = 100;
    static final List<String> OPTIONS = List.of("--port", "--host", "--capacity");
    static final Map<String, List<String>> METHODS = Map.of(
            "/start", List.of("POST"),
            "/observation", List.of("GET", "POST"),
            "/pause", List.of("POST"),
            "/resume", List.of("POST"),
            "/end", List.of("POST"),
            "/health", List.of("GET"));
    static final Set<String> LARGE = Set.of("/start", "/observation");

    final Tasks tasks;

    Server(Tasks tasks) {
        this.tasks = tasks;
    }

    void handle(HttpExchange exchange) {
        tasks.enter();
        try (exchange) {
            send(exchange, answer(exchange));
        } catch (IOException callerWentAway) {
            // its answer is kept
        } finally {
            tasks.leave();
        }
    }

    private Answer answer(HttpExchange exchange) throws IOException {
        try {
            return route(exchange);
        } catch (Refusal refusal) {
            return refusal.answer;
        } catch (RuntimeException | InterruptedException error) {
            error.printStackTrace();
            return Answer.problem("internal", "unexpected failure: " + error.getClass().getSimpleName());
        }
    }

    private Answer route(HttpExchange exchange) throws IOException, InterruptedException {
        String path = exchange.getRequestURI().getPath(), method = exchange.getRequestMethod();
        List<String> methods = METHODS.get(path);
        if (methods == null) return Answer.problem("not_found", "no such path");
        if (!methods.contains(method))
            return Answer.problem("method_not_allowed", path + " takes " + String.join(", ", methods));
        String version = exchange.getRequestHeaders().getFirst("Tide-Contract");
        if (version != null && !version.strip().equals("1"))
            throw Request.invalid("Tide-Contract", "this server speaks version 1");
        tasks.refuseIfStopping();
        if (path.equals("/health")) return tasks.health();
        if (method.equals("GET")) return tasks.look(Request.query(exchange.getRequestURI().getRawQuery()));

        String type = exchange.getRequestHeaders().getFirst("Content-Type");
        if (type == null || !type.split(";")[0].strip().equalsIgnoreCase("application/json"))
            return Answer.problem("media_type", "send Content-Type: application/json");
        byte[] bytes = read(exchange.getRequestBody(), LARGE.contains(path) ? 32 * MIB : MAX_SMALL_BODY_BYTES);
        Map<String, Object> body = Request.object(Json.parse(bytes), "body");
        return switch (path) {
            case "/start" -> tasks.start(Request.start(body));
            case "/observation" -> tasks.act(Request.action(body));
            case "/end" -> tasks.end(Request.end(body));
            default -> tasks.pauseOrResume(Request.epoch(body), path.equals("/pause"));
        };
    }

    private static byte[] read(InputStream stream, int limit) throws IOException {
        byte[] bytes = stream.readNBytes(limit + 1);
        if (bytes.length <= limit) return bytes;
        // A caller that still sends would not see the answer.
        for (int i = 0; i < MAX_DRAINED_MIB && stream.readNBytes(MIB).length == MIB; i++) continue;
        throw new Refusal(Answer.problem("too_large", "body: at most " + limit + " bytes", "field", "body"));
    }

    private static void send(HttpExchange exchange, Answer answer) throws IOException {
        byte[] bytes = Json.write(answer.body).getBytes(StandardCharsets.UTF_8);
        var headers = exchange.getResponseHeaders();
        headers.set("Tide-Contract", "1");
        headers.set("Content-Type", answer.status < 400 ? "application/json" : "application/problem+json");
        if (answer.status == 429) headers.set("Retry-After", "1");
        if (answer.status == 405)
            headers.set("Allow", String.join(", ", METHODS.get(exchange.getRequestURI().getPath())));
        boolean head = exchange.getRequestMethod().equals("HEAD");
        exchange.sendResponseHeaders(answer.status, head ? -1 : bytes.length);
        if (!head) exchange.getResponseBody().write(bytes);
    }

    /** SIGTERM. */
    private void stop() {
        try {
            tasks.stop();
        } catch (InterruptedException ended) {
            // then at once
        }
        Runtime.getRuntime().halt(0); // else the exit code would be 143
    }

    public static void main(String[] args) throws IOException, InterruptedException {
        Map<String, String> options = new HashMap<>();
        for (int i = 0; i < args.length; i += 2) {
            if (!OPTIONS.contains(args[i]) || i + 1 == args.length) usage();
            options.put(args[i], args[i + 1]);
        }
        Map<String, String> env = System.getenv();
        String port = options.getOrDefault("--port", env.get("TIDE_PORT"));
        String host = options.containsKey("--port") ? "127.0.0.1" : env.getOrDefault("TIDE_HOST", "0.0.0.0");
        host = options.getOrDefault("--host", host);
        String capacity = options.getOrDefault("--capacity", env.getOrDefault("TIDE_CAPACITY", "64"));
        if (port == null || !port.matches("\\d{1,5}") || !capacity.matches("[1-9]\\d{0,8}")) usage();

        System.setProperty("sun.net.httpserver.nodelay", "true");
        System.setProperty("sun.net.httpserver.maxIdleConnections", "10000");
        System.setProperty("sun.net.httpserver.idleInterval", "60"); // seconds; the gateway keeps them for 4
        Tasks tasks = new Tasks(Integer.parseInt(capacity));
        Server server = new Server(tasks);
        HttpServer http = null;
        try {
            http = HttpServer.create(new InetSocketAddress(host, Integer.parseInt(port)), 1024);
        } catch (BindException taken) {
            System.err.println("address already in use: " + host + ":" + port);
            System.exit(1);
        }
        http.setExecutor(Executors.newCachedThreadPool());
        http.createContext("/", server::handle);
        http.start();
        Runtime.getRuntime().addShutdownHook(new Thread(server::stop));
        System.out.println("listening on http://" + host + ":" + port);
        while (true) {
            Thread.sleep(SWEEP_EVERY_MS);
            tasks.tick();
        }
    }

    private static void usage() {
        System.err.println("usage: java -cp build Server [--port N] [--host H] [--capacity N], or TIDE_PORT and so on");
        System.exit(2);
    }
}
