// The contract's calls over one class of games.
//
//   request -> route -> body (bounded) -> JSON -> checked fields -> Task -> the author's object -> answer
//
// Back-pressure: `capacity` tasks, then 429. A sweep ends the tasks whose clocks have expired.

import { randomUUID } from "node:crypto";
import { performance } from "node:perf_hooks";

import { endBody, epochBody, observationBody, startBody } from "./bodies.mjs";
import { DEFAULT_LIMITS } from "./clocks.mjs";
import { parse, same, write } from "./json.mjs";
import { invalid, Problem } from "./problem.mjs";
import { Task } from "./task.mjs";

const VERSION = "1";
// What a caller may send is 16 MiB; a gateway writes it anew, with other ids and in other words for the same numbers.
const MAX_BODY_BYTES = 32 * 1024 * 1024;
const MAX_SMALL_BODY_BYTES = 64 * 1024;
const MAX_REMEMBERED = 4096;
const MAX_REMEMBERED_CHARS = 64 * 1024 * 1024;
const SWEEP_EVERY_MS = 250;
// A gateway kills what has not ended 2 s after SIGTERM.
const STOP_LIMIT_MS = 1000;

class CallerGone extends Error {}

export class EnvironmentServer {
  /** Random at each start: from another one the gateway learns that all tasks of this process are gone. */
  incarnation = randomUUID();
  #tasks = new Map(); // by id: live ones, and released ones whose answers can still be asked for
  #keys = new Map(); // by key: the newest attempt
  #live = new Set();
  #released = []; // oldest first
  #numRememberedChars = 0;
  #stopping = false;
  #routes = {
    "/start": { POST: (request) => this.#start(request) },
    "/observation": { POST: (request) => this.#observe(request), GET: (request) => this.#latest(request) },
    "/pause": { POST: (request) => this.#pause(request, true) },
    "/resume": { POST: (request) => this.#pause(request, false) },
    "/end": { POST: (request) => this.#end(request) },
    "/health": { GET: () => [200, write(this.health())] },
  };

  /**
   * @param makeGame makes the author's object of one task, with the methods start, step and end
   * @param name what the environment is called
   * @param capacity tasks held at once
   * @param now monotonic seconds
   */
  constructor(makeGame, { name, capacity, now = () => performance.now() / 1000 }) {
    this.name = name;
    this.capacity = capacity;
    this.makeGame = makeGame;
    this.now = now;
    this.sweeper = setInterval(() => this.sweep(), SWEEP_EVERY_MS);
  }

  /** The listener of node:http. */
  handle = async (request, response) => {
    try {
      const [status, text] = await this.#answer(request);
      send(response, status, text);
    } catch (error) {
      if (error instanceof CallerGone) return;
      if (!(error instanceof Problem)) console.error(`${request.method} ${request.url} failed:`, error);
      const problem = error instanceof Problem ? error : new Problem("internal", "unexpected; see the server's log");
      send(response, problem.status, write(problem.body()), problem.headers(), "application/problem+json");
    }
  };

  health() {
    const { name, capacity, incarnation } = this;
    return { contract: Number(VERSION), environment: name, capacity, tasks: this.#live.size, incarnation };
  }

  /** End the tasks whose clocks have expired. */
  sweep() {
    for (const task of this.#live) task.sweep();
  }

  /** Take no more tasks, and end those that are open, within a second. */
  async stop() {
    this.#stopping = true;
    clearInterval(this.sweeper);
    const ends = Promise.all([...this.#live].map((task) => task.end("the server stops")));
    await Promise.race([ends, new Promise((resolve) => setTimeout(resolve, STOP_LIMIT_MS))]);
  }

  #answer(request) {
    const path = request.url.split("?", 1)[0];
    if (!Object.hasOwn(this.#routes, path)) {
      throw new Problem("not_found", `no endpoint ${path}; there are ${Object.keys(this.#routes).join(", ")}`);
    }
    const methods = this.#routes[path];
    const version = request.headers["tide-contract"];
    if (!Object.hasOwn(methods, request.method)) {
      const allow = Object.keys(methods).join(", ");
      throw new Problem("method_not_allowed", `${path} takes ${allow}`, { allow });
    }
    if (version !== undefined && version !== VERSION) {
      throw invalid("Tide-Contract", `this server speaks version ${VERSION}`);
    }
    return methods[request.method](request);
  }

  async #start(request) {
    const asked = startBody(parse(await readBody(request, MAX_BODY_BYTES)));
    return [201, await this.#findOrStart(asked).started];
  }

  async #observe(request) {
    const { task_id: id, turn, message } = observationBody(parse(await readBody(request, MAX_BODY_BYTES)));
    return [200, await this.#task(id).observe(turn, message)];
  }

  #latest(request) {
    const ids = new URLSearchParams(request.url.split("?")[1]).getAll("task_id");
    if (ids.length !== 1) throw invalid("task_id", "give it once, as ?task_id=...");
    return [200, this.#task(ids[0]).latest()];
  }

  async #pause(request, paused) {
    const { task_id: id, epoch } = epochBody(parse(await readBody(request, MAX_SMALL_BODY_BYTES)));
    return [200, this.#task(id).pause(epoch, paused)];
  }

  async #end(request) {
    const { task_id: id, reason } = endBody(parse(await readBody(request, MAX_SMALL_BODY_BYTES)));
    return [200, await this.#task(id).end(reason)];
  }

  #task(id) {
    const task = this.#tasks.get(id);
    if (task === undefined) throw new Problem("not_found", "task_id: this server knows no such task", { field: "task_id" });
    return task;
  }

  #findOrStart(asked) {
    let older = this.#keys.get(asked.key);
    if (older?.startFailed && asked.attempt >= older.request.attempt) older = undefined;
    if (older !== undefined) {
      const attempt = older.request.attempt;
      if (asked.attempt < attempt) throw new Problem("stale_attempt", `attempt ${attempt} of this key has started`);
      if (asked.attempt === attempt) {
        if (same(asked, older.request)) return older;
        throw new Problem("key_conflict", "key: it was already used for another start", { field: "key" });
      }
    }
    if (this.#stopping) throw new Problem("unavailable", "the server stops", { retry_after_s: 5 });
    const taken = this.#live.size - (this.#live.has(older) ? 1 : 0); // the older attempt gives its place to this one
    if (taken >= this.capacity) {
      throw new Problem("capacity", `all ${this.capacity} places are taken`, { reason: "capacity", retry_after_s: 1 });
    }
    if (older !== undefined) older.superseded = true;
    const limits = { ...DEFAULT_LIMITS, ...asked.limits };
    const task = new Task(randomUUID(), asked, this.makeGame, limits, this.now, (ended) => this.#remember(ended));
    this.#tasks.set(task.id, task);
    this.#keys.set(asked.key, task);
    this.#live.add(task);
    task.begin(older);
    return task;
  }

  /** Keep a released task's answers, for calls that are repeated, until there are too many. */
  #remember(task) {
    this.#live.delete(task);
    this.#released.push(task);
    task.numCharsKept = task.numChars;
    this.#numRememberedChars += task.numCharsKept;
    while (
      this.#released.length > MAX_REMEMBERED ||
      (this.#numRememberedChars > MAX_REMEMBERED_CHARS && this.#released.length > 1)
    ) {
      const oldest = this.#released.shift();
      this.#numRememberedChars -= oldest.numCharsKept;
      this.#tasks.delete(oldest.id);
      if (this.#keys.get(oldest.request.key) === oldest) this.#keys.delete(oldest.request.key);
    }
  }
}

/** Answer what is no HTTP, or did not come in time; for node:http's `clientError`. */
export function refuseConnection(error, socket) {
  if (!socket.writable || error.code === "ECONNRESET") {
    socket.destroy();
    return;
  }
  const late = error.code === "ERR_HTTP_REQUEST_TIMEOUT";
  const problem = invalid("body", late ? "it did not arrive in time" : `no HTTP request: ${error.code}`);
  const text = write(problem.body());
  const head = ["HTTP/1.1 422 Unprocessable Entity", "Content-Type: application/problem+json", `Tide-Contract: ${VERSION}`];
  socket.end([...head, `Content-Length: ${Buffer.byteLength(text)}`, "Connection: close", "", text].join("\r\n"));
}

function send(response, status, text, headers = {}, type = "application/json") {
  const length = Buffer.byteLength(text);
  response.writeHead(status, { "Content-Type": type, "Content-Length": length, "Tide-Contract": VERSION, ...headers });
  response.end(text);
}

function readBody(request, maxBytes) {
  const type = (request.headers["content-type"] ?? "").split(";", 1)[0].trim().toLowerCase();
  if (type !== "application/json") throw new Problem("media_type", "send the body with Content-Type: application/json");
  const words = `body: it may have at most ${maxBytes} bytes`;
  const tooLarge = new Problem("too_large", words, { field: "body", max_bytes: maxBytes });
  if (Number(request.headers["content-length"] ?? 0) > maxBytes) throw tooLarge;
  return new Promise((resolve, reject) => {
    const pieces = [];
    let numBytes = 0;
    request.on("data", (piece) => {
      numBytes += piece.length;
      pieces.push(piece);
      if (numBytes <= maxBytes) return;
      pieces.length = 0; // the rest is read and dropped: a caller that still sends would not see the answer
      reject(tooLarge);
    });
    request.on("end", () => resolve(Buffer.concat(pieces)));
    request.on("error", () => reject(new CallerGone()));
    request.on("close", () => reject(new CallerGone()));
  });
}
