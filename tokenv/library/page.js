// Request the boundaries of the text from the server while it is typed, one request at a time.
"use strict";

const PAUSE = 100; // milliseconds between a change and its request, which includes all changes in between
const SLOW = 150; // milliseconds after which the page says that it is computing
const element = (id) => document.getElementById(id);
const text = element("text"), rate = element("rate"), threshold = element("threshold"), download = element("download");
const cards = []; // for each run its checkpoints and its elements
let timer = 0, busy = false, again = false, shown = null;

async function fetched(path, options) {
  const response = await fetch(path, options);
  if (!(response.headers.get("content-type") || "").includes("json")) throw new Error(await response.text());
  const values = await response.json();
  if (!response.ok) throw new Error(values.error);
  return values;
}

function say(message, failed = false) {
  element("status").textContent = message;
  element("status").className = failed ? "failed" : "";
}

function currentRequest() {
  return {
    text: text.value,
    checkpoints: Object.fromEntries(cards.map((card) => [card.run, card.checkpoints[card.slider.value].name])),
    rate: Number(rate.value) ? Number(rate.value) / 100 : null,
    threshold: threshold.checked,
  };
}

function tellSliders() {
  const own = Number(rate.value) === 0;
  element("rate-value").textContent = own ? "the model’s own" : (rate.value / 100).toFixed(2);
  rate.setAttribute("aria-valuetext", element("rate-value").textContent);
  for (const card of cards) {
    const description = card.checkpoints[card.slider.value].description;
    card.description.textContent = description;
    card.slider.setAttribute("aria-valuetext", description);
  }
}

function draw(answer) {
  document.querySelectorAll(".ticks span").forEach((tick, i) => { tick.textContent = answer.labels[i]; });
  answer.runs.forEach((result, i) => {
    const card = cards[i];
    card.failed.hidden = !result.error;
    card.failed.textContent = result.error || "";
    card.drawn.innerHTML = result.html || ""; // escaped by the server, and no script but this file's may run
    const first = card.drawn.querySelector(".b");
    if (first) first.tabIndex = 0;
    card.facts.replaceChildren(...Object.entries(result.facts || {}).map(([name, value]) => {
      const fact = document.createElement("div");
      fact.append(document.createElement("dt"), document.createElement("dd"));
      fact.firstChild.textContent = name;
      fact.lastChild.textContent = value;
      return fact;
    }));
  });
}

// Move the one Tab stop of a run's text (a roving tabindex) to the boundary that has the focus.
function focused({ currentTarget, target }) {
  currentTarget.querySelectorAll("[tabindex='0']").forEach((stop) => { stop.tabIndex = -1; });
  target.tabIndex = 0;
}

function walk(event) {
  const stops = [...event.currentTarget.querySelectorAll(".b")], at = stops.indexOf(event.target), last = stops.length - 1;
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
  if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  stops[Math.min(Math.max(to, 0), last)].focus();
}

function clear(message, failed = false) {
  shown = null;
  for (const card of cards) {
    card.drawn.replaceChildren();
    card.facts.replaceChildren();
    card.failed.hidden = true;
  }
  say(message, failed);
}

async function update() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  const request = currentRequest();
  const slow = setTimeout(() => {
    element("runs").ariaBusy = "true";
    say("computing…");
  }, SLOW);
  try {
    if (request.text) {
      const answer = await fetched("spans", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(request),
      });
      draw(answer);
      shown = { ...request, runs: answer.runs };
      say("");
    } else clear("Type a text.");
  } catch (error) {
    clear(error.message, true);
  }
  clearTimeout(slow);
  element("runs").ariaBusy = "false";
  download.disabled = shown === null;
  document.body.dataset.state = "drawn"; // for whoever waits, as tests do
  busy = false;
  if (again) {
    again = false;
    update();
  }
}

function changed() {
  tellSliders();
  timer ||= setTimeout(() => {
    timer = 0;
    update();
  }, PAUSE);
}

function save() {
  const runs = shown.runs.map(({ run, checkpoint, error, spans }) => [run, error ? { checkpoint, error } : { checkpoint, ...spans }]);
  const { text: cut, rate: wanted, threshold: drawn } = shown;
  const values = { text: cut, rate: wanted, threshold: drawn, runs: Object.fromEntries(runs) };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(values)], { type: "application/json" }));
  link.download = "tokens.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function place(run, number) {
  const section = element("run").content.cloneNode(true).firstElementChild;
  const slider = section.querySelector("input"), label = section.querySelector("label");
  const at = run.checkpoints.findIndex((checkpoint) => checkpoint.name === run.default);
  section.querySelector("h2").textContent = `${run.run} (${run.agent}, rate ${run.rate})`;
  slider.id = label.htmlFor = section.querySelector("output").htmlFor = `checkpoint-${number}`;
  slider.max = run.checkpoints.length - 1;
  slider.value = Math.max(at, 0);
  slider.hidden = run.checkpoints.length < 2;
  slider.addEventListener("input", changed);
  element("runs").append(section);
  cards.push({
    run: run.run, checkpoints: run.checkpoints, slider, description: section.querySelector("output"),
    facts: section.querySelector("dl"), failed: section.querySelector(".failed"), drawn: section.querySelector(".drawn"),
  });
  cards.at(-1).drawn.addEventListener("focusin", focused);
  cards.at(-1).drawn.addEventListener("keydown", walk);
}

// What the address says after #, such as #text=def&rate=0.3&checkpoint=0, is where one begins.
function begin() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  if (parameters.has("text")) text.value = parameters.get("text");
  if (parameters.has("rate")) rate.value = Math.round(100 * parameters.get("rate"));
  for (const card of cards) if (parameters.has("checkpoint")) card.slider.value = parameters.get("checkpoint");
}

async function start() {
  try {
    (await fetched("runs")).runs.forEach(place);
    begin();
    [text, rate, threshold].forEach((each) => each.addEventListener("input", changed));
    download.addEventListener("click", save);
    tellSliders();
    await update();
  } catch (error) {
    say(error.message, true);
  }
}

start();
