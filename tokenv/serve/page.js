// Asks the server for the text's boundaries a moment after every change, one question at a time.
"use strict";

const QUIET = 200; // milliseconds without a change before a question is asked
const element = (id) => document.getElementById(id);
const text = element("text"), rate = element("rate"), threshold = element("threshold"), download = element("download");
const cards = []; // one a run: its checkpoints and where it is shown
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

function question() {
  return {
    text: text.value,
    checkpoints: Object.fromEntries(cards.map((card) => [card.run, card.checkpoints[card.slider.value].name])),
    rate: Number(rate.value) ? Number(rate.value) / 100 : null,
    threshold: threshold.checked,
  };
}

function tellSliders() {
  const own = Number(rate.value) === 0;
  element("rate-told").textContent = own ? "the model’s own" : (rate.value / 100).toFixed(2);
  rate.setAttribute("aria-valuetext", element("rate-told").textContent);
  for (const card of cards) {
    const told = card.checkpoints[card.slider.value].told;
    card.told.textContent = told;
    card.slider.setAttribute("aria-valuetext", told);
  }
}

function draw(answer) {
  document.querySelectorAll(".ticks span").forEach((tick, i) => { tick.textContent = answer.labels[i]; });
  answer.runs.forEach((found, i) => {
    const card = cards[i];
    card.failed.hidden = !found.error;
    card.failed.textContent = found.error || "";
    card.drawn.innerHTML = found.html || ""; // escaped by the server, and no script but this file's may run
    card.table.replaceChildren(...Object.entries(found.facts || {}).map(([name, value]) => {
      const row = document.createElement("tr"), head = document.createElement("th");
      head.scope = "row";
      head.textContent = name;
      row.append(head);
      row.insertCell().textContent = value;
      return row;
    }));
  });
}

function clear(message, failed = false) {
  shown = null;
  for (const card of cards) {
    card.drawn.replaceChildren();
    card.table.replaceChildren();
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
  const asked = question();
  try {
    if (asked.text) {
      const answer = await fetched("spans", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(asked),
      });
      draw(answer);
      shown = { ...asked, runs: answer.runs };
      say("");
    } else clear("Type a text.");
  } catch (error) {
    clear(error.message, true);
  }
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
  clearTimeout(timer);
  timer = setTimeout(update, QUIET);
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
  const at = run.checkpoints.findIndex((kept) => kept.name === run.chosen);
  section.querySelector("h2").textContent = `${run.run} (${run.agent}, rate ${run.rate})`;
  slider.id = label.htmlFor = section.querySelector("output").htmlFor = `checkpoint-${number}`;
  slider.max = run.checkpoints.length - 1;
  slider.value = Math.max(at, 0);
  slider.disabled = run.checkpoints.length < 2;
  slider.addEventListener("input", changed);
  element("runs").append(section);
  cards.push({
    run: run.run, checkpoints: run.checkpoints, slider, told: section.querySelector("output"),
    table: section.querySelector("table"), failed: section.querySelector(".failed"), drawn: section.querySelector(".drawn"),
  });
}

// What the address says after #, such as #text=def&rate=0.3&checkpoint=0, is where one begins.
function begin() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("text")) text.value = wanted.get("text");
  if (wanted.has("rate")) rate.value = Math.round(100 * wanted.get("rate"));
  for (const card of cards) if (wanted.has("checkpoint")) card.slider.value = wanted.get("checkpoint");
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
