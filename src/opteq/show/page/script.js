"use strict";

const PLAY_MS = 350;
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

let network = null;
let chosen = null; // the key of the image
let way = null; // what /api/equilibrium gave
let timer = null;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function say(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

async function fetchJson(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer; start opteq show again.");
  }
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

function query(extra = {}) {
  const values = { image: chosen, ...extra };
  for (const input of document.querySelectorAll("#settings [data-name]")) {
    if (input.dataset.set) values[input.dataset.name] = input.dataset.set;
  }
  return new URLSearchParams(values);
}

// What is asked for anew takes the place of what was asked for before: the server, which gives one thing of a
// kind after the other, does not begin what nobody waits for any more.
const underWay = {};

function giveUp(...kinds) {
  for (const kind of kinds) underWay[kind]?.abort();
}

function ask(kind, path) {
  giveUp(kind);
  underWay[kind] = new AbortController();
  return fetchJson(path, { signal: underWay[kind].signal });
}

const isGivenUp = (error) => error.name === "AbortError";

// Says in `element` what is computed and for how long, until something else is to stand there.
const clocks = new Map();

function computing(element, what) {
  const since = performance.now();
  // Not read out every second.
  const seconds = make("span", { class: "seconds", "aria-hidden": "true" });
  finish(element, `${what} …`, seconds);
  clocks.set(element, setInterval(() => {
    if (!element.isConnected) return clearInterval(clocks.get(element));
    seconds.textContent = ` ${Math.round((performance.now() - since) / 1000)} s`;
  }, 1000));
}

function finish(element, ...content) {
  clearInterval(clocks.get(element));
  clocks.delete(element);
  element.replaceChildren(...content);
}

// Waits for the last change of a slider.
function later(work, wait = 250) {
  let waiting = null;
  return () => {
    clearTimeout(waiting);
    waiting = setTimeout(work, wait);
  };
}

// --- images ---

function addImage(entry) {
  const picture = make("img", { src: entry.picture, alt: entry.name });
  const button = make("button", { type: "button", title: entry.name, "aria-pressed": "false" }, picture);
  button.dataset.key = entry.key;
  button.addEventListener("click", () => choose(entry.key));
  for (const other of [...$("images").children]) if (other.dataset.key === entry.key) other.remove();
  if (entry.key.startsWith("own-")) $("images").prepend(button);
  else $("images").append(button);
}

function choose(key) {
  chosen = key;
  say("");
  for (const button of $("images").children) {
    button.setAttribute("aria-pressed", String(button.dataset.key === key));
  }
  refresh();
}

async function upload(file) {
  say("");
  try {
    const headers = { "X-File-Name": encodeURIComponent(file.name) };
    const entry = await fetchJson("api/images", { method: "POST", headers, body: file });
    addImage(entry);
    choose(entry.key);
  } catch (error) {
    say(error.message);
    // Else it would name a file that is not what is shown.
    $("file").value = "";
  }
}

// --- what follows from image and settings ---

async function refresh() {
  if (chosen === null) return;
  stop();
  giveUp("certificate", "attention", "attack");
  $("way").setAttribute("aria-busy", "true");
  $("progress").hidden = false;
  computing($("progress"), "Following the image to its equilibrium");
  try {
    const found = await ask("equilibrium", `api/equilibrium?${query()}`);
    say("");
    $("results").hidden = false;
    showWay(found);
    certify();
    attend();
    attack();
  } catch (error) {
    if (isGivenUp(error)) return;
    say(error.message);
    $("certificate").replaceChildren();
  }
  finish($("progress"));
  $("progress").hidden = true;
  $("way").setAttribute("aria-busy", "false");
}

function showWay(found) {
  way = found;
  $("input").src = way.image;
  $("outcome").textContent = way.outcome;
  for (const figure of document.querySelectorAll("#pictures figure:not(.input)")) figure.remove();
  for (const name of way.pictures) {
    const caption = `${way.read}, ${name}`;
    const picture = make("img", { alt: caption });
    $("pictures").append(make("figure", { class: "state" }, picture, make("figcaption", {}, caption)));
  }
  $("read").hidden = way.read === "z";
  const gap = way.frames.findIndex(({ place }, i) => way.frames[i + 1]?.place > place + 1);
  $("skipped").hidden = gap < 0;
  if (gap >= 0) {
    const last = superscript(way.frames[gap].step);
    $("skipped").textContent = `Beyond z${last} the slider leaves states out, ever more of them; the curves show all.`;
  }
  $("step").max = String(way.frames.length - 1);
  $("step").value = $("step").max;
  $("objective").toggleAttribute("hidden", way.objective === null);
  $("no-objective").hidden = way.objective !== null;
  showStep();
}

const superscript = (text) => text.replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);

function showStep() {
  if (way === null) return;
  const index = Number($("step").value);
  const frame = way.frames[index];
  const name = frame.step === "*" ? "z*" : `z${superscript(frame.step)}`;
  $("place").textContent = name;
  $("step").setAttribute("aria-valuetext", frame.step === "*" ? "the equilibrium" : `iteration ${frame.step}`);
  document.querySelectorAll("#pictures .state img").forEach((image, i) => { image.src = frame.pictures[i]; });
  chart($("residual"), way.residual, frame.place, "Residual", way.tolerance);
  if (way.objective !== null) {
    // What is left at the end is rounding.
    const floor = 1e-13 * Math.max(...way.objective.map(Math.abs));
    const above = way.objective.map((v) => (v === null || v - way.lowest <= floor ? null : v - way.lowest));
    chart($("objective"), above, frame.place, "Hidden objective above its lowest value", null);
  }
  showShares($("bars"), way, index);
  $("mask-card").hidden = !way.masks;
  if (way.masks) {
    $("mask").src = way.masks[index];
    $("mask").alt = `Classes of the pixels, ${name}`;
    $("label").textContent = "A class for each pixel";
  } else {
    $("label").textContent = way.labels[index];
  }
  showTruth(index);
}

function showTruth(index) {
  const truth = network.images.find((entry) => entry.key === chosen)?.truth ?? {};
  const right = truth.class === way.labels?.[index];
  $("truth").hidden = !truth.class;
  $("truth").textContent = right ? `right: the true class is ${truth.class}` : `wrong: the true class is ${truth.class}`;
  $("truth").classList.toggle("wrong", !right);
  $("true-mask-card").hidden = !truth.mask;
  if (truth.mask) $("true-mask").src = truth.mask;
}

function showShares(list, found, index) {
  list.replaceChildren(...found.classes.map((name, c) => {
    const share = found.shares[index][c] ?? 0;
    const bar = make("span");
    bar.style.width = `${100 * share}%`;
    if (found.colours) bar.style.background = found.colours[c];
    return make("li", {},
      make("span", { class: "name" }, name),
      make("span", { class: "track", "aria-hidden": "true" }, bar),
      make("span", { class: "share" }, `${(100 * share).toFixed(1)} %`));
  }));
}

async function certify() {
  $("certificate").setAttribute("aria-busy", "true");
  const texts = network.statements.map(() => make("dd", {}, "…"));
  $("certificate").replaceChildren(
    ...network.statements.flatMap((name, i) => [make("dt", {}, name), texts[i]]));
  for (const [i, statement] of network.statements.entries()) {
    computing(texts[i], "Computing");
    try {
      finish(texts[i], await ask("certificate", `api/certificate?${query({ statement })}`));
    } catch (error) {
      if (isGivenUp(error)) return;
      finish(texts[i], `Not available: ${error.message}`);
    }
  }
  $("first").hidden = true;
  $("certificate").setAttribute("aria-busy", "false");
}

async function attend() {
  giveUp("attention");
  $("heat").hidden = true;
  if (!$("attention").checked) return;
  try {
    const found = await ask("attention", `api/attention?${query()}`);
    $("heat").src = found.picture;
    $("heat").hidden = false;
  } catch (error) {
    if (isGivenUp(error)) return;
    $("attention").checked = false;
    say(error.message);
  }
}

async function attack() {
  const size = Number($("epsilon").value);
  giveUp("attack");
  $("attacked-card").hidden = true;
  $("attack-bars").replaceChildren();
  if (size === 0) {
    return finish($("attack-text"), "20 steps of projected gradients, away from the predicted class.");
  }
  computing($("attack-text"), "Attacking");
  try {
    const found = await ask("attack", `api/attack?${query({ epsilon: size / 255 })}`);
    const [before, after] = found.labels;
    finish($("attack-text"), found.changed
      ? `The prediction becomes ${after}; it was ${before}.`
      : `The prediction stays ${before}.${found.blind ? " The gradient was zero: this shows nothing." : ""}`);
    $("attacked").src = found.image;
    $("attacked-card").hidden = false;
    showShares($("attack-bars"), found, 1);
  } catch (error) {
    if (!isGivenUp(error)) finish($("attack-text"), error.message);
  }
}

// --- curves over decades ---

function chart(svg, values, place, name, tolerance) {
  const [width, height, left, right, top, bottom] = [440, 216, 46, 12, 12, 38];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const known = values.filter((value) => value !== null && value > 0);
  svg.setAttribute("aria-label", known.length
    ? `${name}: from ${known[0].toExponential(1)} to ${known[known.length - 1].toExponential(1)} in`
      + ` ${values.length - 1} iterations${tolerance ? `, tolerance ${tolerance}` : ""}`
    : `${name}: zero throughout`);
  if (!known.length) {
    svg.replaceChildren(draw("text", { x: left, y: height / 2 }, "zero throughout"));
    return;
  }
  const ends = tolerance ? [...known, tolerance] : known;
  const low = Math.floor(Math.log10(Math.min(...ends)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...ends))), low + 1);
  const last = Math.max(values.length - 1, 1);
  const x = (k) => left + (width - left - right) * k / last;
  const y = (v) => top + (height - top - bottom) * (high - Math.log10(v)) / (high - low);
  const parts = [];
  const every = Math.ceil((high - low) / 6);
  for (let decade = low; decade <= high; decade += every) {
    const at = y(10 ** decade);
    parts.push(draw("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
    const sign = decade < 0 ? "⁻" : "";
    parts.push(draw("text", { x: left - 6, y: at + 4, "text-anchor": "end" },
      `10${sign}${superscript(String(Math.abs(decade)))}`));
  }
  const steps = Math.max(Math.ceil(last / 6), 1);
  for (let k = 0; k <= last; k += steps) {
    parts.push(draw("text", { x: x(k), y: height - 21, "text-anchor": "middle" }, String(k)));
  }
  parts.push(draw("text", { x: width - right, y: height - 5, "text-anchor": "end" }, "plain iteration"));
  if (tolerance) {
    const at = y(tolerance);
    parts.push(draw("line", { class: "tolerance", x1: left, x2: width - right, y1: at, y2: at }));
    parts.push(draw("text", { class: "named", x: left + 4, y: at - 4 }, "tolerance"));
  }
  let path = "";
  let drawing = false;
  values.forEach((value, k) => {
    const shown = value !== null && value > 0;
    if (shown) path += `${drawing ? "L" : "M"}${x(k).toFixed(1)} ${y(value).toFixed(1)}`;
    drawing = shown;
  });
  parts.push(draw("path", { class: "curve", d: path }));
  if (place !== null) {
    parts.push(draw("line", { class: "here", x1: x(place), x2: x(place), y1: top, y2: height - bottom }));
    const value = values[place];
    if (value !== null && value > 0) parts.push(draw("circle", { class: "dot", cx: x(place), cy: y(value), r: 5 }));
  }
  svg.replaceChildren(...parts);
}

// --- stepping ---

function step(by) {
  const slider = $("step");
  slider.value = String(Math.min(Math.max(Number(slider.value) + by, 0), Number(slider.max)));
  showStep();
}

function stop() {
  clearInterval(timer);
  timer = null;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-pressed", "false");
}

function play() {
  if (timer !== null) return stop();
  if ($("step").value === $("step").max) step(-Number($("step").max));
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-pressed", "true");
  timer = setInterval(() => {
    step(1);
    if ($("step").value === $("step").max) stop();
  }, PLAY_MS);
}

function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const typing = event.target.matches("input:not([type=checkbox]), select");
  const pressing = event.target.matches("button, input[type=checkbox]");
  if (event.key === " " && !typing && !pressing) {
    event.preventDefault();
    play();
  } else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && !typing) {
    event.preventDefault();
    stop();
    step(event.key === "ArrowLeft" ? -1 : 1);
  }
}

// --- settings ---

function readable(number) {
  return Number(number.toPrecision(2)).toString();
}

function makeKnob(knob, changed) {
  const value = make("output", {});
  const slider = make("input", {
    type: "range", id: `knob-${knob.name}`, "data-name": knob.name, step: "0.01",
    min: String(Math.log10(knob.lowest)), max: String(Math.log10(knob.highest)),
  });
  slider.reset = () => {
    delete slider.dataset.set;
    slider.value = String(Math.log10(knob.value ?? 0.01));
    value.textContent = knob.value === null ? "–" : readable(knob.value);
  };
  slider.take = () => {
    slider.dataset.set = String(10 ** Number(slider.value));
    value.textContent = readable(10 ** Number(slider.value));
  };
  slider.reset();
  slider.addEventListener("input", () => { slider.take(); changed(); });
  const label = make("label", { for: slider.id }, `${knob.label} `, value);
  return make("div", { class: "controls" }, label, slider);
}

function makeSettings() {
  const changed = later(refresh);
  $("settings").replaceChildren(...network.knobs.map((knob) => makeKnob(knob, changed)));
  if (!network.regularisers.length) {
    if (!network.knobs.length) $("settings").append("This network has no λ, γ or regulariser to change.");
    return;
  }
  const select = make("select", { id: "regulariser", "data-name": "regulariser" },
    ...network.regularisers.map((name) => make("option", { value: name }, name)));
  const strength = $("knob-strength");
  const ownStrength = network.knobs.find((knob) => knob.name === "strength").value !== null;
  const meaning = make("p", { class: "hint", id: "meaning", role: "status" });
  // The strength of a regulariser that there is not would be refused.
  const follow = () => {
    const trained = select.value === network.regularisers[0];
    const none = select.value === "none" || (trained && !ownStrength);
    strength.disabled = none;
    meaning.textContent = network.meanings[select.value] ?? "";
    if (none || trained) strength.reset();
    else if (!strength.dataset.set) strength.take();
  };
  select.reset = () => { select.value = network.regularisers[0]; delete select.dataset.set; follow(); };
  select.addEventListener("change", () => { select.dataset.set = select.value; follow(); changed(); });
  const label = make("label", { for: "regulariser" }, "Regulariser in the hidden objective ");
  $("settings").prepend(make("div", { class: "controls" }, label, select), meaning);
  follow();
}

function reset() {
  for (const input of document.querySelectorAll("#settings [data-name]")) input.reset();
  refresh();
}

// --- start ---

async function start() {
  const dropped = $("drop");
  dropped.addEventListener("dragover", (event) => { event.preventDefault(); dropped.classList.add("over"); });
  dropped.addEventListener("dragleave", () => dropped.classList.remove("over"));
  dropped.addEventListener("drop", (event) => {
    event.preventDefault();
    dropped.classList.remove("over");
    if (event.dataTransfer.files.length) upload(event.dataTransfer.files[0]);
  });
  // A miss must not have the browser leave for the file.
  for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
  $("file").addEventListener("change", () => { if ($("file").files.length) upload($("file").files[0]); });
  $("step").addEventListener("input", () => { stop(); showStep(); });
  $("play").addEventListener("click", play);
  $("reset").addEventListener("click", reset);
  $("attention").addEventListener("change", attend);
  const attackLater = later(attack);
  $("epsilon").addEventListener("input", () => {
    $("epsilon-value").textContent = `${$("epsilon").value}/255`;
    attackLater();
  });
  document.addEventListener("keydown", onKey);
  try {
    network = await fetchJson("api/network");
  } catch (error) {
    return say(error.message);
  }
  document.title = `${network.title} – opteq show`;
  $("title").textContent = network.title;
  $("subtitle").textContent = `${network.map}, ${network.parameters.toLocaleString("en")} parameters, tells apart`
    + ` ${network.classes.length} classes${network.task === "segmentation" ? " of pixels" : ""}`;
  $("absent").textContent = network.absent;
  $("absent").hidden = !network.absent;
  makeSettings();
  $("choice").hidden = false;
  network.images.forEach(addImage);
  if (network.images.length) choose(network.images[0].key);
  else $("way").setAttribute("aria-busy", "false");
}

start();
