"use strict";
// Draws the snapshots that the server sends. All text goes through textContent: names come from clients.

const MOST_HOSTS_IN_MATRIX = 32, MOST_RUNS = 60, KEPT = 300, STRIP_S = 60;
const KEYS = [["1 … 8", "go to a section"], ["w", "why does it wait?"], ["q", "who waits for whom?"], ["t", "record a trace"], ["d", "dark or light"], ["?", "these keys"], ["Esc", "close"]];
const SECTIONS = ["islands", "strip", "timeline", "tenants", "runs", "transfers", "happenings", "log"];
const $ = (selector, from = document) => from.querySelector(selector);
let now = null, history = [], picture = null, openIsland = null, heard = 0;

// --- elements -------------------------------------------------------------------------------------

function h(tag, how = {}, ...inside) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(how)) {
    if (name === "class") one.className = value;
    else if (name === "width") one.style.width = value;
    else if (name === "color") one.style.background = value;
    else if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
    else one.setAttribute(name, value);
  }
  one.append(...inside.filter(child => child !== null && child !== undefined));
  return one;
}

function fill(where, ...children) {
  // The focus stays where it was: elements are made again each second.
  const key = document.activeElement?.dataset?.key, scroll = where.firstElementChild?.scrollTop;
  where.replaceChildren(...children);
  if (scroll) where.firstElementChild.scrollTop = scroll;
  if (key && document.activeElement === document.body) where.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

// Hue and saturation of clients, in the order of their numbers; computations of a client differ in lightness.
const HUES = [[205, 75], [28, 80], [160, 50], [268, 50], [345, 62], [48, 72], [185, 55], [310, 42], [95, 42], [230, 55]];
const hue = client => HUES[Math.max(0, now.clients.findIndex(one => one.number === client)) % HUES.length];
const shade = (client, light) => { const [at, full] = hue(client); return `hsl(${at} ${full}% ${light}%)`; };
const color = client => shade(client, 52);
const hash = text => [...text].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) >>> 0, 7);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const percent = part => part === null || part === undefined ? "–" : `${Math.round(part * 100)} %`;
const many = (count, one, more = one + "s") => `${count} ${count === 1 ? one : more}`;

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (bytes < 1024) return `${bytes < 10 && unit !== "B" ? bytes.toFixed(1) : Math.round(bytes)} ${unit}`; bytes /= 1024; }
  return `${bytes.toFixed(1)} TiB`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (size < 1) return `${(value * 1e3).toFixed(size < .01 ? 1 : 0)} ms`;
  return size < 120 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

const short = value => value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4 ? `${(value / 1e3).toFixed(1)} k` : `${Math.round(value * 10) / 10}`;

function bar(name, part, words, parts = null) {
  const inside = parts ?? [h("i", {width: `${Math.min(100, (part ?? 0) * 100)}%`})];
  return h("div", {class: "bar"}, h("span", {class: "faint"}, name), h("span", {class: "track"}, ...inside), h("span", {}, words));
}

function table(columns, rows) {
  const right = columns.map((_, at) => rows.every(row => typeof row[at] === "number" || (typeof row[at] === "string" && /^([-–]|\d|$)/.test(row[at]))));
  const cell = (tag, value, at) => h(tag, right[at] && rows.length ? {class: "number"} : {}, value instanceof Node ? value : String(value));
  return h("div", {class: "scroll", tabindex: "0"}, h("table", {}, h("thead", {}, h("tr", {}, ...columns.map((c, at) => cell("th", c, at)))),
    h("tbody", {}, ...rows.map(row => h("tr", {}, ...row.map((c, at) => cell("td", c, at)))))));
}

const empty = words => h("div", {class: "empty"}, words);
const note = (section, words) => { $(`#${section} h2 small`).textContent = words; };

// --- sections -------------------------------------------------------------------------------------

function spark(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 34"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
  const most = Math.max(1e-9, ...values), step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, at) => `${(at * step).toFixed(2)},${(32 - 30 * value / most).toFixed(2)}`).join(" ");
  for (const [name, kind, shape] of [["polygon", "sparkfill", `0,34 ${points} 100,34`], ["polyline", "spark", points]]) {
    const line = document.createElementNS(svg.namespaceURI, name);
    line.setAttribute("class", kind); line.setAttribute("points", shape); svg.append(line);
  }
  return svg;
}

function tiles() {
  const last = now.rates, tile = (name, words, of) => h("div", {class: "tile"}, h("span", {class: "faint"}, name), h("b", {}, words), spark(history.map(of)));
  fill($("#tiles"),
    tile("Runs a second", short(last.runs), one => one.runs), tile("Launches a second", short(last.launches), one => one.launches),
    tile("Device use", percent(last.use), one => one.use ?? 0), tile("Runs in flight", short(last.in_flight), one => one.in_flight),
    tile("Queued launches", short(last.queued), one => one.queued), tile("Array data a second", size(last.sent_bytes), one => one.sent_bytes));
}

function heat(part) { return part === null ? css("--track") : `color-mix(in srgb, ${css("--accent")} ${Math.round(12 + 88 * part)}%, ${css("--track")})`; }

function islands() {
  const slow = new Set(now.slow.map(one => one.host)), hosts = now.islands.reduce((sum, i) => sum + i.hosts.length, 0);
  note("islands", `${now.islands.length} islands, ${many(hosts, "host")}, ${many(now.islands.reduce((sum, i) => sum + i.devices, 0), "device")}`
    + (now.waiting_hosts.length ? `, ${now.waiting_hosts.length} spare or draining` : ""));
  const cards = now.islands.map(one => {
    const cells = one.hosts.map(host => h("span", {class: `cell ${host.state === "ready" ? "" : "odd"} ${slow.has(host.name) ? "slow" : ""}`, color: heat(host.use),
      "data-tip": `${host.name}: ${host.state}\nuse ${percent(host.use)}, arrays ${size(host.used_bytes)}` + (host.slow_factor === 1 ? "" : `\n${host.slow_factor.toFixed(1)} × as slow as its gangs`)}));
    const gone = Array.from({length: Math.max(0, one.expected_hosts - one.hosts.length)}, (_, at) => h("span", {class: "cell off", "data-tip": `${one.missing[at] ?? "a host"} is not there`}));
    const part = one.limit_bytes ? one.used_bytes / one.limit_bytes : null;
    return h("button", {class: "island", "data-key": `island ${one.name}`, onclick: () => showIsland(one.name)},
      h("span", {class: "top"}, h("span", {}, one.name), h("span", {class: `pill ${one.state}`}, one.state)),
      h("span", {class: "faint"}, `${one.hosts.length}/${one.expected_hosts} hosts · ${one.devices} × ${one.kind || one.platform}` + (one.formed > 1 ? ` · formed ${one.formed} times` : "")),
      bar("use", one.use, percent(one.use)), bar("memory", part, one.limit_bytes ? `${size(one.used_bytes)} of ${size(one.limit_bytes)}` : size(one.used_bytes)),
      h("span", {class: "faint"}, `${one.launched} launched · ${one.queued} queued · ${many(one.slices, "slice")}`), h("span", {class: one.expected_hosts > 16 ? "cells" : "cells few"}, ...cells, ...gone));
  });
  fill($("#islands .body"), ...(cards.length ? cards : [empty("No island has any host yet.")]));
}

function tenants() {
  const c = now.clients;
  note("tenants", `${many(c.length, "client")}, policy ${now.policy}` + (now.hidden_clients ? `; not shown: ${many(now.hidden_clients, "client")} of other tenants` : ""));
  const use = (one, paint) => h("span", {class: "use"}, h("span", {class: "track"}, h("i", {width: `${100 * (one.use ?? 0)}%`, ...(paint ? {color: paint} : {})})), percent(one.use));
  const waits = one => [one.runs, one.queued, seconds(one.waiting_s), seconds(one.launches ? one.waited_s / one.launches : null), size(one.arrays_bytes)];
  const rows = now.tenants.flatMap(t => [
    [h("b", {}, t.name), "", t.share, use(t), ...waits(t)],
    ...c.filter(one => one.tenant === t.name).map(one => [h("span", {class: "client", "data-tip": one.name + (one.awaited_hosts.length ? `\nwaits for ${one.awaited_hosts.join(", ")}` : "")}, h("i", {class: "swatch", color: color(one.number)}), one.name, one.silent_s ? h("span", {class: "faint"}, ` silent for ${one.silent_s.toFixed(0)} s`) : ""), one.number, one.share, use(one, color(one.number)), ...waits(one)])]);
  fill($("#tenants .body"), c.length ? table(["tenant, client", "number", "share", "device use", "runs", "queued", "waits", "mean wait", "arrays"], rows) : empty("No client is connected."));
}

function runs() {
  const all = now.runs, slowest = [...all].sort((a, b) => b.age_s - a.age_s).slice(0, MOST_RUNS);
  note("runs", `${now.rates.in_flight} in flight` + (all.length > MOST_RUNS ? `, the ${MOST_RUNS} oldest are shown` : "") + (now.hidden_runs ? `; ${now.hidden_runs} of other tenants` : "") + ". Click a program for its plan");
  const rows = slowest.map(run => [run.run, h("button", {class: "link", "data-key": `plan ${run.run}`, onclick: () => showPlan(run.program)}, h("i", {class: "swatch", color: color(run.client)}), run.program), run.islands.join(", "), seconds(run.age_s), run.segments_left]);
  fill($("#runs .body"), rows.length ? table(["run", "program", "islands", "since", "parts left"], rows) : empty("Nothing is in flight."));
}

function happenings() {
  note("happenings", (now.has_events ? "events of the controller" : "changes of the status, once a second") + (now.recoveries ? `; ${many(now.recoveries, "client")} recovering` : ""));
  const lines = [...now.happenings].reverse().map(one => h("p", {class: one.what}, h("span", {class: "faint"}, `${new Date(one.time_s * 1000).toLocaleTimeString()}  `), one.words));
  fill($("#happenings .body"), ...(lines.length ? lines : [empty("Nothing yet.")]));
}

function log() {
  note("log", now.tenant ? "for operators only" : "of the controller and the hosts, the newest first; the logs of the daemons have more");
  const lines = [...now.lines].reverse().map(one => h("p", {class: one.level}, h("span", {class: "faint"}, `${new Date(one.time_s * 1000).toLocaleTimeString()}  `), `${one.process}  ${one.level}: ${one.text}`));
  fill($("#log .body"), ...(lines.length ? lines : [empty(now.tenant ? "–" : "None.")]));
}

function notices() {
  const found = [];
  if (now.trouble) found.push(h("div", {class: "notice bad"}, `This picture is old: ${now.trouble}`));
  for (const one of now.slow) found.push(h("div", {class: "notice"}, h("b", {}, `${one.host} is slow. `), one.words));
  for (const one of now.islands) if (one.missing.length) found.push(h("div", {class: "notice bad"}, h("b", {}, `${one.name} is ${one.state}. `), `Not there: ${one.missing.slice(0, 8).join(", ")}${one.missing.length > 8 ? " …" : ""}`));
  if (now.silent.length) found.push(h("div", {class: "notice"}, `No answer about memory: ${now.silent.slice(0, 8).join(", ")}`));
  fill($("#notices"), ...found);
}

// --- canvases -------------------------------------------------------------------------------------

function canvasOf(section, height) {
  const canvas = $(`#${section} canvas`), ratio = devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  canvas.style.height = `${height}px`; canvas.width = width * ratio; canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle"; canvas.spots = [];
  return [canvas, pen, width];
}

function drawStrip() {
  // Each piece has the device time of one look at the cluster, so nothing between two looks is left out.
  const devices = Math.max(1, now.islands.reduce((sum, one) => sum + one.devices, 0)), tall = 64;
  const [canvas, pen, width] = canvasOf("strip", tall + 18), pieces = history.map(one => one.work).filter(one => one && one.until_s > now.time_s - STRIP_S);
  const place = time => width * (1 + (time - now.time_s) / STRIP_S);
  note("strip", `the last ${STRIP_S} s, by client, of ${many(devices, "device")}`);
  pen.fillStyle = css("--track"); pen.fillRect(0, 0, width, tall);
  for (const one of pieces) {
    // A computation counts when it ends: one that is longer than the piece began before it.
    const all = one.device_s.reduce((sum, [, spent]) => sum + spent, 0), long = Math.max(one.until_s - one.from_s, all / devices, .01);
    const x = Math.max(0, place(one.until_s - long)), wide = place(one.until_s) - x; let top = tall;
    for (const [client, spent] of one.device_s) {
      const high = tall * spent / (long * devices);
      top -= high; pen.fillStyle = client ? color(client) : css("--faint"); pen.fillRect(x, top, Math.max(1, wide + .5), high);
      canvas.spots.push([x, top, wide, high, `${now.clients.find(own => own.number === client)?.name ?? (client ? `client ${client}, which has left` : "others")}\n${percent(spent / (long * devices))} of all devices`]);
    }
  }
  pen.fillStyle = css("--faint");
  for (let part = 0; part <= 4; part++) { pen.textAlign = part === 4 ? "right" : part ? "center" : "left"; pen.fillText(part === 4 ? "now" : `${STRIP_S * (4 - part) / 4} s ago`, width * part / 4, tall + 10); }
}

function drawTimeline() {
  if (!picture || !picture.rows.length) { note("timeline", "a sample is taken while runs are in flight"); canvasOf("timeline", 1); return; }
  const row = picture.rows.length > 24 ? 10 : 18, label = Math.min(190, Math.max(90, ...picture.rows.map(r => r[0].length * 6.5 + 30)));
  const [canvas, pen, width] = canvasOf("timeline", picture.rows.length * row + 20), scale = (width - label - 8) / picture.length_ms;
  const age = Math.max(0, Math.round(now.time_s - picture.time_s));
  note("timeline", `${Math.round(picture.length_ms)} ms, ${age < 2 ? "now" : `${age} s ago`}, by device` + (picture.omitted ? `; ${picture.omitted} shorter ones are left out` : ""));
  picture.rows.forEach(([host, device, slices], at) => {
    const top = at * row;
    pen.fillStyle = css("--faint"); if (row > 12 || at % 2 === 0) pen.fillText(`${host} · ${device}`, 0, top + row / 2, label - 8);
    pen.fillStyle = css("--track"); pen.fillRect(label, top + 1, width - label - 8, row - 2);
    for (const [start, end, name, client] of slices) {
      const x = label + start * scale, wide = Math.max(.8, (end - start) * scale);
      pen.fillStyle = shade(client, 34 + hash(name) % 19); pen.fillRect(x, top + 1, wide > 2 ? wide - .6 : wide, row - 2);
      if (wide > name.length * 6 + 8 && row > 12) { pen.fillStyle = "#fff"; pen.fillText(name, x + 4, top + row / 2, wide - 6); }
      canvas.spots.push([x, top, Math.max(2, wide), row, `${name}\n${(end - start).toFixed(2)} ms, client ${client}\n${host}, device ${device}`]);
    }
  });
  pen.fillStyle = css("--faint");
  for (let part = 0; part <= 4; part++) { pen.textAlign = part === 4 ? "right" : part ? "center" : "left"; pen.fillText(`${Math.round(picture.length_ms * part / 4)} ms`, label + (width - label - 8) * part / 4, picture.rows.length * row + 11); }
}

function drawTransfers() {
  const island = Object.fromEntries(now.islands.flatMap(one => one.hosts.map(host => [host.name, one.name])));
  let names = [...new Set(now.transfers.flatMap(([from, to]) => [from, to]))].sort(), unit = "host";
  let cells = now.transfers;
  if (names.length > MOST_HOSTS_IN_MATRIX) {
    unit = "island"; const sums = new Map();
    for (const [from, to, bytes] of cells) { const key = JSON.stringify([island[from] ?? from, island[to] ?? to]); sums.set(key, (sums.get(key) ?? 0) + bytes); }
    cells = [...sums].map(([key, bytes]) => [...JSON.parse(key), bytes]); names = [...new Set(cells.flatMap(([from, to]) => [from, to]))].sort();
  }
  if (!names.length) { note("transfers", "no edges in the samples of the last minute"); canvasOf("transfers", 1); return; }
  const label = Math.min(190, 32 + Math.max(...names.map(name => name.length)) * 6.5), room = $("#transfers .body").clientWidth - label - 60;
  const side = Math.max(7, Math.min(30, room / names.length)), most = Math.max(...cells.map(cell => cell[2]));
  const [canvas, pen] = canvasOf("transfers", names.length * side + 24);
  note("transfers", `rows send, columns of the same numbers receive; by ${unit}, at most ${size(most)} a second`);
  const at = Object.fromEntries(names.map((name, index) => [name, index]));
  names.forEach((name, y) => {
    pen.fillStyle = css("--faint"); pen.textAlign = "left"; pen.fillText(`${y + 1}  ${name}`, 0, y * side + side / 2, label - 8);
    names.forEach((_, x) => { pen.fillStyle = css("--track"); pen.fillRect(label + x * side + 1, y * side + 1, side - 2, side - 2); });
    pen.fillStyle = css("--faint"); pen.textAlign = "center"; if (side > 13) pen.fillText(String(y + 1), label + y * side + side / 2, names.length * side + 11);
  });
  for (const [from, to, bytes] of cells) {
    const x = label + at[to] * side, y = at[from] * side;
    pen.globalAlpha = .2 + .8 * Math.sqrt(bytes / most); pen.fillStyle = css("--accent"); pen.fillRect(x + 1, y + 1, side - 2, side - 2); pen.globalAlpha = 1;
    canvas.spots.push([x, y, side, side, `${from} → ${to}\n${size(bytes)} a second`]);
  }
}

// --- dialogs --------------------------------------------------------------------------------------

function show(subject, ...children) {
  $("#subject").textContent = subject; $("#dialog .body").replaceChildren(...children);
  if (!$("#dialog").open) $("#dialog").showModal();
}

async function ask(path, how = {}) {
  const answer = await fetch(path, how);
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

async function asked(subject, path, draw) {
  openIsland = null; show(subject, empty("The controller is asked …"));
  try { show(subject, ...draw(await (await ask(path)).json())); } catch (error) { show(subject, h("pre", {}, error.message)); }
}

const showWhy = () => asked("Why does it wait?", "why", told => [h("pre", {}, told.text)]);
const tables = told => [h("p", {}, told.head), ...told.tables.filter(one => one.rows.length).flatMap(one => [h("h2", {}, one.title), table(one.columns, one.rows)])];
const showQueue = () => asked("Who waits for whom?", "queue", tables);
const showPlan = name => asked(`Plan of ${name}`, `plan?name=${encodeURIComponent(name)}`, tables);
const showKeys = () => { openIsland = null; show("Keys", table(["key", ""], KEYS.map(([key, words]) => [h("kbd", {}, key), words]))); };

async function showIsland(name) {
  openIsland = name;
  const one = now.islands.find(island => island.name === name);
  let devices = {};
  try { devices = await (await ask(`island/${encodeURIComponent(name)}`)).json(); } catch (error) { show(name, h("pre", {}, error.message)); return; }
  if (!one || openIsland !== name) return;
  const colors = Object.fromEntries(now.clients.map(client => [client.name, color(client.number)]));
  const rows = one.hosts.flatMap(host => (devices[host.name] ?? []).map((device, at) => {
    const all = Math.max(1, device.limit_bytes ?? device.arrays_bytes ?? 1);
    const parts = device.clients.map(([client, bytes]) => h("i", {width: `${100 * bytes / all}%`, color: colors[client] ?? css("--accent"), "data-tip": `${client}: ${size(bytes)}`}));
    const memory = h("div", {}, h("div", {class: "track"}, ...parts), h("span", {class: "faint"}, `${size(device.arrays_bytes)}${device.limit_bytes ? ` of ${size(device.limit_bytes)}` : ""}${device.reserved_bytes ? `, ${size(device.reserved_bytes)} reserved` : ""}${device.host_bytes ? `, ${size(device.host_bytes)} in host memory` : ""}${device.file_bytes ? `, ${size(device.file_bytes)} in files` : ""}`));
    const who = h("span", {class: "faint"}, device.clients.map(([client, bytes]) => `${client}: ${size(bytes)}`).join("; ") || "–");
    return [at ? "" : h("span", {class: "name"}, host.name), at ? "" : h("span", {class: `pill ${host.state}`}, host.state), at || !host.pid ? "" : String(host.pid), at ? "" : seconds(host.behind_s), device.device, h("span", {class: "use"}, h("span", {class: "track"}, h("i", {width: `${100 * (device.use ?? 0)}%`})), percent(device.use)), memory, who];
  }));
  show(`${name}: ${one.state}, ${one.hosts.length} of ${many(one.expected_hosts, "host")}`, table(["host", "state", "pid", "behind", "device", "use", "memory", "by client"], rows));
}

async function recordTrace() {
  const button = $("#trace"); if (button.disabled) return;
  button.disabled = true; button.textContent = "Recording 2 s …";
  try {
    const answer = await ask("trace?seconds=2", {method: "POST"}), link = h("a", {href: URL.createObjectURL(await answer.blob()), download: /filename="(.*)"/.exec(answer.headers.get("content-disposition"))?.[1] ?? "pw.json"});
    link.click(); setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    show("Recorded", h("p", {}, decodeURIComponent(answer.headers.get("x-summary"))), h("p", {class: "faint"}, `${link.download} is saved. Open it at ui.perfetto.dev.`));
  } catch (error) { show("No trace", h("pre", {}, error.message)); }
  button.disabled = false; button.textContent = "Record a trace";
}

// --- the stream -----------------------------------------------------------------------------------

function draw() {
  if (!now) return;
  $("#where").textContent = `${now.address}  ·  pw ${now.pw_version}, jax ${now.jax_version}` + (now.tenant ? `  ·  tenant ${now.tenant}` : "");
  notices(); tiles(); islands(); tenants(); runs(); happenings(); log(); drawStrip(); drawTimeline(); drawTransfers();
  if (openIsland && $("#dialog").open) showIsland(openIsland);
}

function live() {
  const fresh = now && !now.trouble && performance.now() - heard < 4000, pill = $("#live");
  pill.textContent = fresh ? "live" : now ? "not live" : "connecting"; pill.className = `pill ${fresh ? "good" : "bad"}`;
}

const stream = new EventSource("events");
stream.addEventListener("history", event => { history = JSON.parse(event.data); });
stream.addEventListener("message", async event => {
  const next = JSON.parse(event.data), isNew = next.sample && next.sample !== picture?.number;
  now = next; heard = performance.now(); history.push(now.rates); if (history.length > KEPT) history.shift();
  draw(); live();
  if (isNew) { try { picture = await (await ask("picture")).json(); drawTimeline(); } catch { /* the next snapshot tries again */ } }
});
stream.addEventListener("error", live);
setInterval(live, 1000);
addEventListener("resize", () => { if (now) { drawStrip(); drawTimeline(); drawTransfers(); } });

function theme(name) { document.documentElement.dataset.theme = name; localStorage.setItem("pw-theme", name); draw(); }
theme(localStorage.getItem("pw-theme") ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark"));
const turn = () => theme(document.documentElement.dataset.theme === "light" ? "dark" : "light");
$("#why").addEventListener("click", showWhy); $("#queue").addEventListener("click", showQueue); $("#trace").addEventListener("click", recordTrace); $("#theme").addEventListener("click", turn);
$("#help").addEventListener("click", showKeys); $("#close").addEventListener("click", () => $("#dialog").close());
$("#dialog").addEventListener("close", () => { openIsland = null; });
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("#dialog").open) return;
  const section = SECTIONS[Number(event.key) - 1], does = {w: showWhy, q: showQueue, t: recordTrace, d: turn, "?": showKeys}[event.key];
  if (section) { $(`#${section}`).scrollIntoView({block: "start"}); ($(`#${section} button`) ?? $(`#${section} .scroll`))?.focus({preventScroll: true}); } else if (does) { event.preventDefault(); does(); }
});
addEventListener("pointermove", event => {
  const tip = $("#tip"), canvas = event.target.closest?.("canvas"); let words = event.target.dataset?.tip;
  if (canvas?.spots) { const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top; words = canvas.spots.find(([l, t, w, tall]) => x >= l && x <= l + w && y >= t && y <= t + tall)?.[4]; }
  tip.hidden = !words; if (!words) return;
  tip.textContent = words; tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`; tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
});
