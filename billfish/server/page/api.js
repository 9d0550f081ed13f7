// What the page asks of the server, and its answers and errors in words.

const KEY = "billfish-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, { message = "", code = null } = {}, retryAfter = 0) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

/** The response, if it is a success or one of `accept`; ApiError otherwise, TypeError without any. */
export async function request(path, { body, signal, headers = {}, accept = [] } = {}) {
  const options = { signal, headers: { ...headers }, cache: "no-store", credentials: "omit" };
  if (key.get()) options.headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.ok || accept.includes(response.status)) return response;
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(response.status, answer.error, retryAfter);
}

export const json = async (path, options) => (await request(path, options)).json();

/** The objects of a stream of events. ApiError for one that is an error; TypeError if the stream
 * ends before it says so itself. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("the connection was lost");
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error);
      yield event;
    }
  }
}

const CODES = {
  engine_starting: "The model is still being loaded. Try again in a moment.",
  engine_dead: "The engine is not running. The server starts it again if that can help: try again in a moment.",
  engine_draining: "The server is shutting down and takes no more requests.",
  engine_died: "The engine ended while it worked on this answer. The server starts it again: try again once it is ready.",
  host_not_allowed: "The server does not answer to this address. Start it with --allowed-host to allow it.",
};

/** What to tell a person. begun: whether part of an answer had come. */
export function explain(error, begun = false) {
  if (!(error instanceof ApiError)) {
    return begun
      ? "The connection was lost before the answer was complete."
      : "The server cannot be reached. Is it running, and is the network there?";
  }
  if (CODES[error.code]) return CODES[error.code];
  if (error.status === 401) {
    return key.get() ? "The server does not know this API key." : "The server wants an API key.";
  }
  if (error.status === 429) {
    const when = error.retryAfter > 1 ? `in ${error.retryAfter} seconds` : "in a second";
    return `The server is busy and its queue is full. Try again ${when}.`;
  }
  if (error.code === "context_length_exceeded") {
    return `This conversation is too long for the model: ${error.message}. Start a new chat, or write less.`;
  }
  if (error.status >= 500 || error.status === 0) {
    return `The server could not answer: ${error.message || "it gave no reason"}.`;
  }
  return `The server refused this: ${error.message || `status ${error.status}`}`;
}
