// How the server does: its figures once a second, as long as somebody looks.

const PERIOD_MS = 1000;
const HISTORY = 120; // rates kept, one a period
const WINDOW = 5; // periods that a rate is the mean of

const $ = (id) => document.getElementById(id);

let samples = []; // [time, prompt tokens, output tokens], newest last
let rates = [];

function setText(id, text) {
  if ($(id).textContent !== text) {
    $(id).textContent = text;
  }
}

const perSecond = (value) => `${value < 100 ? value.toFixed(1) : Math.round(value)} tokens/s`;
const percent = (value) => `${(100 * value).toFixed(1)} %`;

function showState(status) {
  setText("phase", status.phase);
  $("phase").className = `badge ${status.phase}`;
  setText("detail", status.detail);
  $("key-entry").hidden = !status.needs_key;
  const model = $("model");
  if (model.options.length !== status.models.length) {
    model.replaceChildren(...status.models.map((name) => new Option(name)));
  }
}

function showLoad({ time, stats }) {
  if (samples.length && time < samples.at(-1)[0]) {
    samples = rates = []; // another server has taken its place
  }
  samples = [...samples, [time, stats.prompt_tokens, stats.generation_tokens]].slice(-WINDOW - 1);
  const [first, last] = [samples[0], samples.at(-1)];
  const seconds = last[0] - first[0];
  if (seconds > 0) {
    const [prompt, output] = [1, 2].map((index) => (last[index] - first[index]) / seconds);
    setText("prompt-rate", perSecond(prompt));
    setText("output-rate", perSecond(output));
    rates = [...rates, output].slice(-HISTORY);
    drawHistory();
  }
  setText("running", String(stats.num_running));
  setText("waiting", String(stats.num_waiting));
  $("kv").value = stats.kv_usage;
  setText("kv-shown", percent(stats.kv_usage));
  const { prefix_queries: queries, prefix_hits: hits } = stats;
  setText("hits", queries ? percent(hits / queries) : "-");
}

function drawHistory() {
  const top = Math.max(1, ...rates);
  const offset = HISTORY - rates.length;
  const points = rates.map((rate, index) => `${offset + index},${(38 - (36 * rate) / top).toFixed(2)}`);
  $("history-line").setAttribute("points", points.join(" "));
  setText("history-top", `, top ${perSecond(top)}`);
}

function showPhases({ phases, phase }) {
  const isLoading = phase === "loading";
  const rows = phases.map(({ name, seconds }, index) => {
    const isLast = index === phases.length - 1;
    return [name, seconds, isLoading && isLast ? "now" : ""];
  });
  const total = phases.reduce((sum, { seconds }) => sum + seconds, 0);
  rows.push(["total", total, "total"]);
  const items = rows.map(([name, seconds, className]) => {
    const [item, label, time] = ["li", "span", "span"].map((tag) => document.createElement(tag));
    item.className = className;
    label.textContent = name;
    time.textContent = `${seconds.toFixed(1)} s`;
    item.append(label, time);
    return item;
  });
  $("phases").replaceChildren(...items);
}

async function update() {
  if (document.hidden) {
    return;
  }
  try {
    const answer = await fetch("page/status", { cache: "no-store" });
    const status = await answer.json();
    showState(status);
    showLoad(status);
    showPhases(status);
  } catch {
    setText("phase", "not reachable");
    $("phase").className = "badge gone";
  }
}

async function watch() {
  for (;;) {
    await update();
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

document.addEventListener("visibilitychange", update);
watch();
