// The command of an environment server: where to listen, when to stop.

import { chmodSync, lstatSync, renameSync, unlinkSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { resolve } from "node:path";
import process from "node:process";
import { parseArgs } from "node:util";

import { EnvironmentServer, refuseConnection } from "./app.mjs";

const USAGE = "[--port N | --uds PATH] [--host 127.0.0.1] [--capacity N] [--announce FILE] [--allow-public]";
const BODY_LIMIT_MS = 60_000;
// Longer than any client keeps an idle connection, so that the client closes first and no call meets a closing one.
const KEEP_ALIVE_MS = 75_000;
const BACKLOG = 1024;
const LAST_ANSWERS_MS = 500;

class UsageError extends Error {}

/**
 * Serve until SIGTERM or SIGINT. What the command line leaves open comes from TIDE_UDS, TIDE_HOST, TIDE_PORT and
 * TIDE_CAPACITY, which the gateway sets for containers.
 *
 * @param makeGame makes the author's object of one task
 * @param name what the environment is called
 * @param capacity tasks held at once, where nobody says how many
 */
export function serve(makeGame, { name, capacity }) {
  const fail = (words) => {
    console.error(`${name}: ${words}`);
    process.exit(2);
  };
  let options;
  try {
    options = readOptions(process.argv.slice(2), process.env);
  } catch (error) {
    return fail(`${error.message}\nusage: node server.mjs ${USAGE}`);
  }
  const app = new EnvironmentServer(makeGame, { name, capacity: options.capacity ?? capacity });
  const server = createServer({ connectionsCheckingInterval: 5000, noDelay: true }, app.handle);
  server.requestTimeout = BODY_LIMIT_MS;
  server.keepAliveTimeout = KEEP_ALIVE_MS;
  server.on("clientError", refuseConnection);
  server.on("error", (error) => fail(`cannot listen: ${error.message}`));
  server.listen({ ...place(options), backlog: BACKLOG }, () => {
    if (options.uds !== undefined) chmodSync(options.uds, options.udsMode);
    const url = urlOf(server, options);
    console.error(`${name} at ${url}`);
    if (options.announce !== undefined) announce(options.announce, url);
  });
  const stop = async () => {
    server.close(() => process.exit(0)); // no new connections; a unix socket's file goes with it
    await app.stop();
    // Calls that waited have their answers now, which get out before the process ends.
    server.closeIdleConnections();
    setTimeout(() => process.exit(0), LAST_ANSWERS_MS);
  };
  process.once("SIGTERM", stop);
  process.once("SIGINT", stop);
  return server;
}

function readOptions(argv, environ) {
  const text = { type: "string" };
  const known = { host: text, port: text, uds: text, capacity: text, announce: text, "allow-public": { type: "boolean" } };
  const { values } = parseArgs({ args: argv, options: known }); // throws on what it does not know
  const placed = values.host !== undefined || values.port !== undefined || values.uds !== undefined;
  const from = placed ? values : { uds: environ.TIDE_UDS, host: environ.TIDE_HOST, port: environ.TIDE_PORT };
  const options = {
    uds: from.uds ? resolve(from.uds) : undefined,
    // In a container the gateway is another user; it gave a folder that nobody else gets into.
    udsMode: placed ? 0o600 : 0o666,
    host: from.host || "127.0.0.1",
    port: number(from.port, "--port (TIDE_PORT)", 0, 65_535) ?? 0,
    capacity: number(values.capacity ?? environ.TIDE_CAPACITY, "--capacity (TIDE_CAPACITY)", 1, 2 ** 31 - 1),
    announce: values.announce,
  };
  const local = options.host === "localhost" || options.host === "::1" || /^127(\.\d+){3}$/.test(options.host);
  if (options.uds === undefined && !local && !values["allow-public"]) {
    throw new UsageError(`${options.host} can be reached from other machines; give --allow-public if that is meant`);
  }
  return options;
}

function number(text, option, min, max) {
  if (text === undefined || text === "") return undefined;
  const value = Number(text);
  if (/^\d+$/.test(text) && value >= min && value <= max) return value;
  throw new UsageError(`${option} must be a whole number from ${min} to ${max}, not ${text}`);
}

function place({ uds, host, port }) {
  if (uds === undefined) return { host, port };
  // What a process that was killed left behind would refuse the name.
  if (lstatSync(uds, { throwIfNoEntry: false })?.isSocket()) unlinkSync(uds);
  return { path: uds };
}

function urlOf(server, { uds, host }) {
  if (uds !== undefined) return `unix:${uds}`;
  return `http://${host.includes(":") ? `[${host}]` : host}:${server.address().port}`;
}

/** Write the address to a file, whole or not at all. */
function announce(path, url) {
  writeFileSync(`${path}.part`, JSON.stringify({ url, pid: process.pid }));
  renameSync(`${path}.part`, path);
}
