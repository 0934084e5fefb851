"use strict";
// Drawings need no script: this shows the values under a pointer, and keeps a page that is served up to date.
const root = document.documentElement;

// -- values under a pointer: the listeners are the document's, since what they look at is replaced in a live page.
function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, index) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = index; });
  return best;
}
function valuesAt(plot, share) {
  const axis = JSON.parse(plot.dataset.x);
  const place = axis.log ? Math.log : (value) => value;
  const low = place(axis.low), high = place(axis.high), wanted = low + share * (high - low);
  const found = [];
  for (const line of JSON.parse(plot.dataset.series)) {
    let best = null;
    for (const piece of line.pieces) {
      const index = nearest(piece.x.map(place), wanted);
      const distance = Math.abs(place(piece.x[index]) - wanted);
      if (best === null || distance < best.distance)
        best = {distance, x: piece.x[index], text: `${line.name} ${piece.y[index]}` + (piece.name ? ` (${piece.name})` : "")};
    }
    found.push(best);
  }
  const x = found.reduce((one, other) => other.distance < one.distance ? other : one).x;
  const texts = found.filter((one) => Math.abs(place(one.x) - place(x)) <= (high - low) / 100).map((one) => one.text);
  return {share: (place(x) - low) / (high - low), text: `${axis.title} ${x}: ${texts.join(", ")}`};
}
function clear() {
  for (const one of document.querySelectorAll(".readout, .cursor")) one.remove();
}
function show(plot, text, share) {
  clear();
  const readout = document.createElement("div");
  readout.className = "readout";
  readout.textContent = text;
  plot.append(readout);
  if (share === undefined) return;
  const cursor = document.createElement("div"), drawing = plot.querySelector("svg");
  cursor.className = "cursor";
  const inner = drawing.getBoundingClientRect(), outer = plot.getBoundingClientRect();
  cursor.style.left = `${inner.left - outer.left + share * inner.width}px`;
  cursor.style.top = `${inner.top - outer.top}px`;
  cursor.style.height = `${inner.height}px`;
  plot.append(cursor);
}
function point(event) {
  const plot = event.target.closest ? event.target.closest(".plot") : null;
  if (plot === null) return clear();
  const title = event.target.title || event.target.querySelector?.(":scope > title")?.textContent;
  if (title) return show(plot, title);
  if (plot.dataset.series === undefined) return clear();
  const box = plot.querySelector("svg").getBoundingClientRect();
  const {share, text} = valuesAt(plot, Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1));
  show(plot, text, share);
}
document.addEventListener("pointermove", point);
document.addEventListener("pointerdown", point);
addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });

// -- a page that is served
let silentSince = null;
async function refresh() {
  const note = document.querySelector(".live");
  try {
    const answer = await fetch(location.href, {cache: "no-store", signal: AbortSignal.timeout(60000)});
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = [...document.querySelectorAll("details")].map((one) => one.open);
    const scrolled = [...document.querySelectorAll(".wide")].map((one) => one.scrollLeft);
    document.title = fresh.title;
    for (const part of ["header", "main", "footer"])
      document.querySelector(part).replaceChildren(...fresh.querySelector(part).childNodes);
    document.querySelectorAll("details").forEach((one, index) => { one.open = open[index] ?? false; });
    document.querySelectorAll(".wide").forEach((one, index) => { one.scrollLeft = scrolled[index] ?? 0; });
    note.textContent = `live, read at ${new Date().toLocaleTimeString()}`;
    note.classList.remove("bad");
    silentSince = null;
    root.dataset.live = fresh.documentElement.dataset.live;
  } catch (error) {
    silentSince ??= new Date().toLocaleTimeString();
    note.textContent = `not up to date: no answer from runner report --serve since ${silentSince}`;
    note.classList.add("bad");
    await new Promise((resume) => setTimeout(resume, 5000));
    return refresh();
  }
  setTimeout(refresh, 1000 * root.dataset.live);
}
if (root.dataset.live !== undefined) setTimeout(refresh, 1000 * root.dataset.live);
