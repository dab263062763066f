// Errors of the contract: problem+json (RFC 9457) with a stable `code`, by which callers decide what to do.

const CODES = {
  not_found: [404, "No such task"],
  method_not_allowed: [405, "The endpoint does not take this method"],
  turn_conflict: [409, "The turn was already taken with another message"],
  turn_order: [409, "The turn is out of order"],
  key_conflict: [409, "The key was already used for another start"],
  stale_attempt: [409, "A higher attempt of this key exists"],
  state_conflict: [409, "The task's state does not allow this call"],
  expired: [410, "A clock of the task has expired"],
  ended: [410, "The task has ended"],
  too_large: [413, "The body is too large"],
  media_type: [415, "The body must be application/json"],
  invalid: [422, "The request is not valid"],
  paused: [423, "The task is paused"],
  capacity: [429, "No capacity now"],
  internal: [500, "Unexpected failure in the server"],
  environment_failed: [502, "The environment failed"],
  unavailable: [503, "The server cannot serve now"],
  turn_expired: [504, "The turn's clock expired while the environment acted"],
};

/** A failure that the contract names. `extra` are further members of the body: field, clock, retry_after_s and so on. */
export class Problem extends Error {
  constructor(code, detail, extra = {}) {
    super(detail);
    this.code = code;
    this.status = CODES[code][0];
    this.extra = extra;
  }

  /** The body. */
  body() {
    const [status, title] = CODES[this.code];
    return { type: `urn:tide:problem:${this.code}`, title, status, code: this.code, detail: this.message, ...this.extra };
  }

  /** Headers that belong to it. */
  headers() {
    const { retry_after_s: retryAfter, allow } = this.extra;
    return {
      ...(retryAfter === undefined ? {} : { "Retry-After": String(Math.max(1, Math.ceil(retryAfter))) }),
      ...(allow === undefined ? {} : { Allow: allow }),
    };
  }
}

/** A field of a request is wrong. The detail begins with the field's name, so that it is read wherever it ends up. */
export function invalid(field, words) {
  return new Problem("invalid", `${field}: ${words}`, { field });
}
