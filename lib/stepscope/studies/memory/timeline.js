// The memory timeline: a picture of every event of one run at a time, to zoom into and to point at.
// Each run has by columns: at (events between allocations), life (events; 0: lives on), size (bytes), category
// and place (numbers of names); and marks: [event, name of the phase that begins].
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas"), pen = canvas.getContext("2d"), what = document.getElementById("what");
const select = document.getElementById("run");
const LEFT = 70, TOP = 22, MIB = 2 ** 20, GIB = 2 ** 30;
let run, from, to, low, high, chosen = null, cursor = null;

function openRun(index) {
  const raw = DATA.runs[index], n = raw.size.length, at = new Int32Array(n), end = new Int32Array(n);
  let position = 0, events = 0;
  for (let i = 0; i < n; i++) {
    at[i] = position += raw.at[i];
    end[i] = raw.life[i] ? at[i] + raw.life[i] : 0x7fffffff;
    events = Math.max(events, at[i] + 2, raw.life[i] ? end[i] + 2 : 0);
  }
  const levels = DATA.categories.map(() => new Float64Array(events));
  for (let i = 0; i < n; i++) {
    levels[raw.category[i]][at[i] + 1] += raw.size[i];
    if (raw.life[i]) levels[raw.category[i]][end[i] + 1] -= raw.size[i];
  }
  const total = new Float64Array(events);
  for (const level of levels) for (let e = 0, sum = 0; e < events; e++) total[e] += level[e] = sum += level[e];
  const highest = total.reduce((best, bytes, e) => bytes > total[best] ? e : best, 0);
  run = { raw, at, end, levels, total, events, top: total[highest] };
  chosen = cursor = null;  // what was pointed at is of another run
  what.textContent = `Peak: ${size(run.top)} asked for (the allocator rounds up), at event ${highest} of ${events}.`;
  showAll();
}
function showAll() { from = 0; to = run.events - 1; low = 0; high = run.top * 1.05 || 1; draw(); }

const size = bytes => bytes >= GIB ? (bytes / GIB).toFixed(2) + " GiB" : bytes >= 1e5 ? (bytes / MIB).toFixed(2) + " MiB" : bytes.toLocaleString("en") + " bytes";
const width = () => Math.max(1, canvas.clientWidth - LEFT), height = () => Math.max(1, canvas.clientHeight - TOP);
const eventAt = x => Math.min(run.events - 1, Math.max(0, Math.round(from + (to - from) * (x - LEFT) / width())));
const xOf = event => LEFT + (event - from) / (to - from) * width();
const bytesAt = y => low + (high - low) * (1 - (y - TOP) / height());
const yOf = bytes => Math.min(TOP + height(), Math.max(TOP, TOP + height() * (1 - (bytes - low) / (high - low))));

// Round marks at the axis, about so many: 1, 2 or 5 times a power of ten of one unit.
function ticks(about = 5) {
  const unit = high - low >= GIB ? GIB : high - low >= MIB ? MIB : high - low >= 1024 ? 1024 : 1;
  const rough = (high - low) / unit / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const name = { [GIB]: "GiB", [MIB]: "MiB", 1024: "KiB", 1: "bytes" }[unit], decimals = Math.max(0, -Math.floor(Math.log10(step)));
  const found = [];
  for (let k = Math.ceil(low / unit / step); k * step * unit <= high; k++)
    found.push([k * step * unit, `${(k * step).toFixed(decimals)} ${name}`]);
  return found;
}

function draw() {
  if (!run || !canvas.clientWidth || !canvas.clientHeight) return;  // folded: drawn when it has a size
  const ratio = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
  const color = name => style.getPropertyValue(name).trim();
  canvas.width = canvas.clientWidth * ratio; canvas.height = canvas.clientHeight * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  pen.font = "12px system-ui, sans-serif";
  const wide = width(), bottom = TOP + height();
  for (const [bytes] of ticks()) { pen.fillStyle = color("--line"); pen.fillRect(LEFT, Math.round(yOf(bytes)), wide, 1); }
  for (let x = 0; x < wide; x++) {  // a column shows the event of its range at which most is live
    const first = Math.floor(from + (to - from) * x / wide), last = Math.max(first, Math.floor(from + (to - from) * (x + 1) / wide) - 1);
    let best = Math.min(first, run.events - 1);
    for (let e = best; e <= last && e < run.events; e++) if (run.total[e] > run.total[best]) best = e;
    let below = 0;
    run.levels.forEach((level, c) => {
      if (level[best] <= 0) return;
      const floor = yOf(below), top = yOf(below += level[best]);
      pen.fillStyle = paint(c);
      pen.fillRect(LEFT + x, top, 1, floor - top);
    });
  }
  pen.fillStyle = color("--quiet");
  pen.textAlign = "right"; pen.textBaseline = "middle";
  for (const [bytes, name] of ticks()) pen.fillText(name, LEFT - 6, Math.min(bottom - 6, yOf(bytes)));
  pen.textAlign = "left";
  let free = LEFT;  // names of phases that are too near the one before are left out until there is room
  for (const [event, name] of run.raw.marks) {
    const x = xOf(event);
    if (x < LEFT - 1 || x > LEFT + wide) continue;
    pen.fillStyle = color("--edge");
    pen.fillRect(Math.round(x), TOP - 6, 1, bottom - TOP + 6);
    const room = pen.measureText(name).width;
    if (x >= free && x + room < LEFT + wide) { pen.fillStyle = color("--text"); pen.fillText(name, x + 3, TOP / 2 - 1); free = x + room + 12; }
  }
  if (chosen !== null) {
    const x = Math.max(LEFT, xOf(run.at[chosen])), end = Math.min(LEFT + wide, xOf(Math.min(run.end[chosen], run.events)));
    pen.strokeStyle = color("--text"); pen.lineWidth = 2;
    pen.strokeRect(x, TOP + 1, Math.max(end - x, 1), bottom - TOP - 2);
  }
  if (cursor !== null) {
    pen.strokeStyle = color("--text"); pen.lineWidth = 1; pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(xOf(cursor), TOP); pen.lineTo(xOf(cursor), bottom); pen.stroke(); pen.setLineDash([]);
  }
}
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = c => dark.matches && DATA.colors[c] === "#000000" ? "#c9ced2" : DATA.colors[c];

// What is live at an event, from below: by category, in each the oldest first.
function stack(event) {
  const found = DATA.categories.map(() => []);
  for (let i = 0; i < run.at.length && run.at[i] < event; i++) if (run.end[i] >= event) found[run.raw.category[i]].push(i);
  return found.flat();
}
function find(x, y) {  // the allocation under a point of the canvas
  const bytes = bytesAt(y);
  let below = 0;
  return stack(eventAt(x)).find(i => (below += run.raw.size[i]) > bytes) ?? null;
}
function tell(event, found) {
  const raw = run.raw;
  let text = `Event ${event}: ${size(run.total[event])} live (`
    + run.levels.map((level, c) => [level[event], DATA.categories[c]]).filter(part => part[0] > 0).map(([bytes, name]) => `${name} ${size(bytes)}`).join(", ") + ").";
  if (found !== null) {
    const lives = raw.life[found] ? `freed at ${run.end[found]}` : "never freed";
    text += `\n${size(raw.size[found])} (${raw.size[found].toLocaleString("en")} bytes), ${DATA.categories[raw.category[found]]}, allocated at ${run.at[found]}, ${lives}.\n${DATA.places[raw.place[found]]}`;
  }
  chosen = found;
  what.textContent = text;
  draw();
}
const point = (x, y) => { cursor = null; tell(eventAt(x), find(x, y)); };

function zoom(middle, factor) {
  const span = Math.min(run.events - 1, Math.max(10, (to - from) * factor)), share = (middle - from) / (to - from);
  from = Math.min(Math.max(0, middle - span * share), Math.max(0, run.events - 1 - span));
  to = Math.min(run.events - 1, from + span);
  draw();
}
function zoomHeight(bytes, factor) {
  low = Math.max(0, bytes - (bytes - low) * factor);
  high = Math.min(run.top * 1.05, bytes + (high - bytes) * factor);
  draw();
}
function move(events) {
  const room = Math.min(Math.max(events, -from), run.events - 1 - to);
  from += room; to += room;
}

const fingers = new Map();
let held = null;  // where dragging began, or how far two fingers were apart
function grasp() {
  const [a, b] = [...fingers.values()];
  held = a && { x: b ? (a.x + b.x) / 2 : a.x, apart: b ? Math.abs(a.x - b.x) : 0, from, to };
}
canvas.addEventListener("pointerdown", event => {
  canvas.setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
  grasp();
  if (event.pointerType !== "mouse" && fingers.size === 1) point(event.offsetX, event.offsetY);
});
canvas.addEventListener("pointermove", event => {
  if (!fingers.has(event.pointerId)) return event.pointerType === "mouse" ? point(event.offsetX, event.offsetY) : undefined;
  fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
  const [a, b] = [...fingers.values()];
  if (b && held.apart > 5) {
    const middle = held.from + (held.to - held.from) * (held.x - LEFT) / width();
    [from, to] = [held.from, held.to];
    return zoom(middle, held.apart / Math.max(5, Math.abs(a.x - b.x)));
  }
  if (event.pointerType !== "mouse" && to - from >= run.events - 1) return point(event.offsetX, event.offsetY);
  [from, to] = [held.from, held.to];
  move((held.x - a.x) / width() * (to - from));
  return draw();
});
for (const name of ["pointerup", "pointercancel"])
  canvas.addEventListener(name, event => { fingers.delete(event.pointerId); grasp(); });
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const factor = event.deltaY + event.deltaX < 0 ? 0.8 : 1.25;
  if (event.shiftKey) zoomHeight(bytesAt(event.offsetY), factor);
  else zoom(eventAt(event.offsetX), factor);
}, { passive: false });
canvas.addEventListener("dblclick", showAll);

canvas.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = cursor ?? Math.round((from + to) / 2), along = Math.max(1, Math.round((to - from) / 100));
  const keys = {
    ArrowLeft: () => go(at - along), ArrowRight: () => go(at + along), Home: () => go(0), End: () => go(run.events - 1),
    ArrowUp: () => climb(1), ArrowDown: () => climb(-1), "+": () => zoom(at, 0.8), "=": () => zoom(at, 0.8), "-": () => zoom(at, 1.25), 0: showAll,
  };
  function go(to_) {
    cursor = Math.min(run.events - 1, Math.max(0, to_));
    if (cursor < from || cursor > to) move(cursor - (from + to) / 2);
    tell(cursor, null);
  }
  function climb(by) {
    cursor = at;
    const live = stack(at), now = live.indexOf(chosen);
    tell(at, live.length ? live[now < 0 ? (by > 0 ? 0 : live.length - 1) : Math.min(live.length - 1, Math.max(0, now + by))] : null);
  }
  if (Object.hasOwn(keys, event.key)) { event.preventDefault(); keys[event.key](); }
});

document.getElementById("closer").addEventListener("click", () => zoom(cursor ?? (from + to) / 2, 0.5));
document.getElementById("wider").addEventListener("click", () => zoom(cursor ?? (from + to) / 2, 2));
document.getElementById("whole").addEventListener("click", showAll);
function colorKeys() {
  document.getElementById("keys").replaceChildren(...DATA.categories.map((name, c) => {
    const item = document.createElement("li"), box = document.createElement("i");
    box.style.background = paint(c);
    item.append(box, name);
    return item;
  }));
}
dark.addEventListener("change", () => { colorKeys(); draw(); });
DATA.runs.forEach((one, i) => select.add(new Option(one.title, i)));
select.addEventListener("change", () => openRun(Number(select.value)));
colorKeys();
openRun(0);
new ResizeObserver(draw).observe(canvas);
