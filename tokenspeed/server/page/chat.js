// The conversation: asked through the same API as anybody's. What a model or a user wrote is only
// ever set as text, never as markup.

import { readEvents } from "./events.js";

const $ = (id) => document.getElementById(id);

let conversation = [];
let running = null; // the AbortController of the answer that streams in

function show(role) {
  $("empty").hidden = true;
  const message = document.createElement("div");
  message.className = `message ${role}`;
  $("messages").append(message);
  return message;
}

function add(parent, tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

/** Keep the newest text in sight, unless the reader has scrolled away from it. */
function follow(change) {
  const box = $("messages");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (isAtEnd) {
    box.scrollTop = box.scrollHeight;
  }
}

function requestBody() {
  const system = $("system").value.trim();
  const temperature = Number($("temperature").value);
  const maxTokens = $("max-tokens").valueAsNumber;
  return {
    model: $("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true,
    stream_options: { include_usage: true },
    temperature: temperature < 0 ? undefined : temperature,
    max_tokens: Number.isFinite(maxTokens) ? maxTokens : undefined,
  };
}

async function request(signal) {
  const headers = { "content-type": "application/json" };
  const key = $("key").value.trim();
  if (key) {
    headers.authorization = `Bearer ${key}`;
  }
  const body = JSON.stringify(requestBody());
  const answer = await fetch("v1/chat/completions", { method: "POST", headers, body, signal });
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `The server answered with status ${answer.status}.`);
  }
  return answer.body;
}

/** An answer on the page: its reasoning (folded away), its text, and how it went. */
class Answer {
  constructor() {
    const message = show("assistant");
    this.reasoning = add(message, "details");
    this.reasoning.hidden = true;
    add(this.reasoning, "summary", "", "Reasoning");
    this.thought = add(this.reasoning, "span");
    this.content = add(message, "span");
    this.facts = add(message, "div", "facts", "waiting for the first token");
    this.began = performance.now();
    this.first = null;
    this.usage = null;
    this.reason = null;
  }

  take(event) {
    if (event.error) {
      throw new Error(event.error.message);
    }
    this.usage = event.usage ?? this.usage;
    for (const { delta, finish_reason: reason } of event.choices) {
      const thought = delta.reasoning_content ?? delta.reasoning ?? "";
      if (this.first === null && (thought || delta.content)) {
        this.first = performance.now();
      }
      this.reasoning.hidden &&= !thought;
      this.thought.append(thought);
      this.content.append(delta.content ?? "");
      this.reason = reason ?? this.reason;
    }
    this.tell("");
  }

  tell(ending) {
    const facts = [];
    if (this.first !== null) {
      facts.push(`first token after ${Math.round(this.first - this.began)} ms`);
      const seconds = (performance.now() - this.first) / 1000;
      const count = this.usage?.completion_tokens;
      if (count > 1 && seconds > 0) {
        facts.push(`${count} tokens`, `${((count - 1) / seconds).toFixed(1)} tokens/s`);
      }
    }
    if (this.reason === "length") {
      facts.push("cut: no more tokens allowed");
    }
    this.facts.textContent = [...facts, ...(ending ? [ending] : [])].join(" · ");
  }

  fail(message) {
    this.tell("");
    add(this.facts, "span", "error", ` ${message}`);
  }
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  follow(() => (show("user").textContent = text));
  const asked = conversation;
  const control = (running = new AbortController());
  const answer = new Answer();
  setBusy(true);
  try {
    for await (const event of readEvents(await request(control.signal))) {
      follow(() => answer.take(event));
    }
  } catch (error) {
    follow(() => (control.signal.aborted ? answer.tell("stopped") : answer.fail(error.message)));
  }
  if (answer.content.textContent) {
    asked.push({ role: "assistant", content: answer.content.textContent });
  } else {
    asked.pop(); // nothing came: the question may be asked again
    $("prompt").value ||= text;
  }
  if (running === control) {
    running = null;
    setBusy(false);
  }
}

function setBusy(isBusy) {
  $("send").disabled = isBusy;
  $("stop").disabled = !isBusy;
}

function clear() {
  running?.abort();
  running = null;
  conversation = [];
  setBusy(false);
  for (const message of document.querySelectorAll(".message")) {
    message.remove();
  }
  $("empty").hidden = false;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (text && running === null) {
    $("prompt").value = "";
    ask(text);
  }
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("temperature").addEventListener("input", () => {
  const value = Number($("temperature").value);
  $("temperature-shown").textContent = value < 0 ? "model's own" : value.toFixed(1);
});
