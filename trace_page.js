// The script of a trace's page; trace_page.py puts it, the data and trace_page.html together.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const ORIGINS = {
  accepted: ["accepted", "drafted, and what the target says too"],
  corrected: ["corrected", "the target's own, in place of a wrong draft token"],
  bonus: ["bonus", "the target's own, after a draft that was right throughout"],
  plain: ["plain", "the target's own; nothing was drafted"],
  prefill: ["prefill", "the target's own, from reading the prompt"],
};
const STOPS = {
  limit: "the largest K was reached", rate: "one more token did not pay", off: "drafting is off", room: "the output ends here",
  exhausted: "the lookup had no more", context: "the draft's context is full", "": "nothing was drafted",
};
const SOURCES = { model: "draft model", lookup: "prompt lookup", none: "nobody" };
const $ = (id) => document.getElementById(id);
const known = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) => known(value) ? value.toFixed(digits) : "n/a";
const milliseconds = (value) => known(value) ? value.toFixed(value < 10 ? 1 : 0) + " ms" : "n/a";

function make(tag, className, ...children) {  // children that are not elements become text, never markup
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.map((child) => child instanceof Node ? child : String(child ?? "")));
  return made;
}
const picture = (character) => character === "\n" ? "↵" : character === "\t" ? "⇥" : String.fromCharCode(0x2400 + character.charCodeAt(0));
const visible = (text) => String(text ?? "").replace(/[\x00-\x1f]/g, picture) || "∅";

const tokens = [];  // {token, round, element, first}
const columns = [];
let selected = -1;

function drawFigures() {
  const s = data.summary, emitted = data.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
  const figures = [["tokens", emitted], ["rounds", data.rounds.length], ["tokens/s", fixed(s.tokens_per_second, 1)],
    ["accepted / drafted", fixed(s.acceptance_rate, 2)], ["tokens/round", fixed(s.tokens_per_round, 2)],
    ["first token", milliseconds((data.rounds[0] || {}).total_ms)]];
  for (const [name, value] of figures) {
    const item = make("li", "faint", make("b", "", value), name);
    $("figures").append(item);
  }
  $("caption").textContent = data.caption;
  $("prompt").textContent = data.prompt || "(no prompt recorded)";
}

function drawRounds() {
  const isPrefill = (round) => round.tokens.some((token) => token.origin === "prefill");
  const longest = Math.max(1, ...data.rounds.filter((round) => !isPrefill(round)).map((round) => round.total_ms || 0));
  const height = (ms) => Math.round(90 * Math.min(1.1, Math.max(0, ms || 0) / longest)) + "px";
  $("scale").textContent = " · highest: " + milliseconds(longest) + "; below: tokens emitted; a dotted top is cut off";
  data.rounds.forEach((round, index) => {
    const rest = (round.total_ms || 0) - (round.draft_ms || 0) - (round.verify_ms || 0);
    const bars = [["rest", rest], ["verify", round.verify_ms], ["draft", round.draft_ms]].map(([name, ms]) => {
      const bar = make("i", name);
      bar.style.height = height(ms);
      return bar;
    });
    const column = make("button", "round", ...bars, make("small", "", round.tokens.length));
    column.type = "button";
    column.tabIndex = index ? -1 : 0;
    column.classList.toggle("cut", (round.total_ms || 0) > 1.1 * longest);
    column.setAttribute("aria-label", `Round ${index}: ${round.tokens.length} tokens, drafting ${milliseconds(round.draft_ms)}, ` +
      `target pass ${milliseconds(round.verify_ms)}`);
    column.addEventListener("click", () => select(firstOf(index), false));
    columns.push(column);
  });
  $("rounds").append(...columns);
}

function drawText() {
  data.rounds.forEach((round, index) => {
    round.tokens.forEach((token, place) => {
      const origin = token.origin in ORIGINS ? token.origin : "plain";
      const element = make("span", "token " + origin + (place ? "" : " first"));
      for (const piece of String(token.text ?? "").split(/(\n)/)) {
        if (piece) element.append(piece === "\n" ? make("span", "mark", "↵") : "", piece);
      }
      if (!element.childNodes.length) element.append(make("span", "mark", "∅"));
      element.tabIndex = tokens.length ? -1 : 0;
      element.setAttribute("role", "button");
      element.setAttribute("aria-label", `${visible(token.text)}, ${origin}, round ${index}, probability ${fixed(token.target_prob, 2)}`);
      element.dataset.index = tokens.length;
      if (place === round.tokens.length - 1) {
        const rejected = drafted(round).slice(round.num_accepted || 0);
        $("text").append(...rejected.map((pair) => make("span", "rejected", visible(pair[1]))));
      }
      tokens.push({ token, origin, round, index, place, element });
      $("text").append(element);
    });
  });
}
const drafted = (round) => Array.isArray(round.drafted) ? round.drafted : [];
const firstOf = (index) => tokens.findIndex((entry) => entry.index === index);

function drawFilters() {
  const counts = {};
  for (const entry of tokens) counts[entry.origin] = (counts[entry.origin] || 0) + 1;
  for (const origin of Object.keys(ORIGINS).filter((name) => counts[name])) {
    addFilter(origin, `${ORIGINS[origin][0]} ${counts[origin]}`, true, ORIGINS[origin][1], (on) => {
      for (const entry of tokens) if (entry.origin === origin) entry.element.classList.toggle("off", !on);
    });
  }
  addFilter("rejections", "rejected drafts", false, "draft tokens that the target did not take, struck through",
    (on) => document.body.classList.toggle("rejections", on));
}
function addFilter(name, text, on, title, act) {
  const box = make("input");
  box.type = "checkbox";
  box.checked = on;
  box.id = "filter-" + name;
  box.addEventListener("change", () => act(box.checked));
  const label = make("label", name, box, " " + text);
  label.title = title;
  $("filters").append(label);
}

function choices(title, pairs, chosen) {
  if (!Array.isArray(pairs) || !pairs.length) return [];
  const rows = pairs.map((pair) => make("tr", pair[0] === chosen ? "chosen" : "", make("td", "", make("code", "", visible(pair[1]))),
    make("td", "right", fixed(pair[pair.length - 1], 3))));
  return [make("h2", "", title), make("table", "", ...rows)];
}
function chance(name, value) {
  const row = make("tr", "", make("th", "", name), make("td", "", fixed(value, 3)));
  if (known(value)) {
    const bar = make("meter");
    bar.value = value;
    row.lastChild.append(bar);
  }
  return row;
}
function show(number) {
  const entry = tokens[number];
  if (!entry) return;
  const { token, origin, round, index, place } = entry;
  const wrong = origin === "corrected" ? drafted(round)[round.num_accepted] : undefined;
  const rows = [chance("target probability", token.target_prob)];
  if (known(token.draft_confidence)) rows.push(chance("draft confidence", token.draft_confidence));
  const facts = [["drafted by", SOURCES[round.source] || round.source], ["drafted / accepted", `${round.k ?? "n/a"} / ${round.num_accepted ?? "n/a"}`],
    ["drafting stopped", STOPS[round.stopped] ?? round.stopped], ["rows of the pass", round.width ?? "n/a"],
    ["siblings", `${round.siblings ?? "n/a"}${round.sibling_hit ? ", one was hit" : ""}`],
    ["drafting", milliseconds(round.draft_ms)], ["target pass", milliseconds(round.verify_ms)], ["whole round", milliseconds(round.total_ms)]];
  $("details").replaceChildren(
    make("div", "quote", make("span", "swatch " + origin, visible(token.text))),
    make("div", "faint", `token ${number} · id ${token.id} · ${ORIGINS[origin][0]}: ${ORIGINS[origin][1]}`),
    ...(wrong ? [make("div", "", "the draft said ", make("code", "", visible(wrong[1])))] : []),
    ...(round.suggested && !place && origin === "accepted" ? [make("div", "", "from a sibling of the round before")] : []),
    make("table", "", ...rows),
    ...choices("The target's choices", token.target_top, token.id),
    ...choices("The draft's next best", token.draft_top, token.id),
    make("h2", "", `Round ${index}`),
    make("table", "", ...facts.map(([name, value]) => make("tr", "", make("th", "", name), make("td", "", value)))));
  columns.forEach((column, place_) => column.classList.toggle("current", place_ === index));
  for (const other of tokens) other.element.classList.toggle("here", other.index === index);
}
function select(number, focus = true) {
  if (!tokens[number]) return;
  if (tokens[selected]) {
    tokens[selected].element.classList.remove("current");
    tokens[selected].element.tabIndex = -1;
    columns[tokens[selected].index].tabIndex = -1;
  }
  selected = number;
  const { element, index } = tokens[number];
  element.classList.add("current");
  element.tabIndex = columns[index].tabIndex = 0;
  if (focus) element.focus();
  columns[index].scrollIntoView({ block: "nearest", inline: "nearest" });
  show(number);
}
const on = (number) => tokens[number] && !tokens[number].element.classList.contains("off");
function step(from, by) {
  let next = from + by;
  while (tokens[next] && !on(next)) next += by;
  return tokens[next] ? next : from;
}
function roundStep(from, by) {  // the first token that is shown of the next round that has one
  for (let index = tokens[from].index + by; columns[index]; index += by) {
    const next = tokens.findIndex((entry, number) => entry.index === index && on(number));
    if (next >= 0) return next;
  }
  return from;
}
function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || selected < 0) return;
  const inRounds = event.currentTarget === $("rounds");
  const moves = inRounds
    ? { ArrowLeft: () => roundStep(selected, -1), ArrowRight: () => roundStep(selected, 1) }
    : { ArrowLeft: () => step(selected, -1), ArrowRight: () => step(selected, 1), ArrowUp: () => roundStep(selected, -1),
        ArrowDown: () => roundStep(selected, 1) };
  Object.assign(moves, { Home: () => step(-1, 1), End: () => step(tokens.length, -1) });
  if (!(event.key in moves)) return;
  event.preventDefault();
  select(Math.max(0, Math.min(tokens.length - 1, moves[event.key]())), !inRounds);
  if (inRounds) columns[tokens[selected].index].focus();
}

drawFigures();
drawRounds();
drawText();
drawFilters();
const pointed = (event) => event.target.closest ? event.target.closest(".token") : null;
$("text").addEventListener("pointerover", (event) => { if (pointed(event)) show(Number(pointed(event).dataset.index)); });
$("text").addEventListener("pointerleave", () => show(selected));
$("text").addEventListener("click", (event) => { if (pointed(event)) select(Number(pointed(event).dataset.index)); });
$("text").addEventListener("focusin", (event) => {
  const found = pointed(event);
  if (found && Number(found.dataset.index) !== selected) select(Number(found.dataset.index), false);
});
$("text").addEventListener("keydown", keys);
$("rounds").addEventListener("keydown", keys);
select(0, false);
