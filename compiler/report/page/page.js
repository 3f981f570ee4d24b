"use strict";
const three = value => value === 0 ? "0" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
const escaped = text => text.replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\"": "&quot;"})[c]);

// Okabe and Ito's colours, which people with any kind of colour vision tell apart.
const KINDS = {
  "forward": "#56b4e9", "backward": "#0072b2", "optimizer": "#009e73", "to the device": "#e69f00",
  "from the device": "#d55e00", "SSD": "#f0e442", "messages": "#cc79a7", "other": "#999999",
};

let facts, spans, wholeEnd, lineText, spansOf, chosen = -1, following = false;
let view = [0, 100];  // per cent of the step
const LEAST = 0.001;  // of it, to be in view
const drawn = {};  // element -> chart
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function decoded() {
  const packed = Uint8Array.from(atob(at("facts").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function chart(id, option) {
  if (drawn[id]) drawn[id].dispose();
  drawn[id] = charts.init(at(id), null, {renderer: "canvas"});
  drawn[id].setOption({
    animation: false, textStyle: {color: colour("--ink"), fontFamily: "system-ui, sans-serif"},
    ...option,
  });
  return drawn[id];
}
const axis = more => ({
  axisLine: {lineStyle: {color: colour("--line")}}, axisTick: {show: false}, axisLabel: {color: colour("--faint")},
  splitLine: {lineStyle: {color: colour("--line")}}, ...more,
});
const tip = more => ({
  backgroundColor: colour("--raised"), borderColor: colour("--line"), textStyle: {color: colour("--ink"), fontSize: 12},
  confine: true, transitionDuration: 0, extraCssText: "max-width: 46rem; white-space: normal", ...more,
});

const clock = value => {  // for axes, whose marks are round
  const [factor, unit] = value === 0 || value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return Number((value * factor).toPrecision(7)) + " " + unit;
};
const timeAxis = more => axis({type: "value", axisLabel: {color: colour("--faint"), formatter: clock, hideOverlap: true}, ...more});
// A round step of an axis of bytes with three to six marks.
const bytesStep = most => 2 ** Math.ceil(Math.log2(Math.max(1, most / 6)));

function table(id, heads, rows) {
  const found = at(id);
  found.replaceChildren();
  const top = make("tr");
  heads.forEach(head => { const th = make("th", head); th.scope = "col"; top.append(th); });
  found.append(top);
  rows.forEach(row => { const tr = make("tr"); row.forEach(cell => tr.append(make("td", cell))); found.append(tr); });
}

// --- verdict, stages

function verdict() {
  const v = facts.verdict, rate = v.tokens ? v.tokens / v.step_s : null;
  at("sentence").textContent = `It fits. A step takes ${seconds(v.step_s)}` +
    (rate ? `, ${three(rate)} tokens a second` : "") + `; bound by ${v.bottleneck}.` +
    (known(v.measured_s) ? ` The last step took ${seconds(v.measured_s)} from rest, where ${seconds(v.from_rest_s)} were predicted.` : "") +
    (v.bound_s ? ` With the kernels of PyTorch's calls no plan for this machine is faster than ${seconds(v.bound_s)} (${v.bound_by}); ${v.could_save}.` : "");
  const rows = [
    ["predicted step", seconds(v.step_s)], ["measured step", known(v.measured_s) ? seconds(v.measured_s) : "none yet"],
    ["tokens a second", rate ? three(rate) : ""], ["stages", v.stages], ["micro-batches", v.micro_batches],
    ["precision", v.precision], ["strategy", v.strategy], ["plan", v.plan],
    ["cost", known(v.price_per_hour) ? `${v.price_per_hour} $ an hour` + (rate ? `, ${three(v.price_per_hour / 3600 / rate * 1e6)} $ a million tokens` : "") : ""],
    ...v.wear.map(w => [`${w.memory} written a day`, bytes(w.written_bytes / w.step_s * 86400) + (known(w.days) ? `, lasts ${three(w.days)} days` : "")]),
  ];
  at("figures").replaceChildren(...rows.filter(row => row[1] !== "").map(([name, value]) => {
    const group = make("div");
    group.append(make("dt", name), make("dd", String(value)));
    return group;
  }));
  at("peaks").replaceChildren(...v.peaks.map(p => {
    const row = make("div", undefined, "peak"), bar = make("div", undefined, "bar"), inner = make("span");
    inner.style.width = Math.min(100, 100 * p.peak / p.budget) + "%";
    bar.append(inner);
    row.append(make("span", p.name), bar, make("span", `peak ${bytes(p.peak)} of ${bytes(p.budget)} (${percent(p.peak / p.budget)})` + (known(p.measured) ? `, measured ${bytes(p.measured)}` : "") + (p.comment ? `: ${p.comment}` : ""), "faint"));
    return row;
  }));
}

function stages() {
  table("stage-table", ["stage", "device", "layers", "weights", "optimizer states", "activations"],
    facts.stages.map(s => [s.name, s.device, s.title, s.weights, s.states || "none", s.activations]));
}

// --- machine

const COLUMNS = [["ssd", "network"], ["ssdbus"], ["dram"], ["rc"], ["device"], ["nvlink"]];  // kinds of nodes, from left to right
const TITLES = {ssdbus: "bus of SSDs", rc: "root complex", nvlink: "device to device"};
const ROW = 58, MEMORY = [150, 42], SWITCH = [120, 32];  // pixels

// Where each node lies: a root complex at the middle of its devices, all else at the middle of the picture.
function placed(m, width) {
  const columns = COLUMNS.map(kinds => m.nodes.filter(node => kinds.includes(node.kind))).filter(nodes => nodes.length);
  const height = ROW * Math.max(...columns.map(nodes => nodes.length)) + 16, left = MEMORY[0] / 2 + 4;
  const places = {};
  columns.forEach((nodes, column) => nodes.forEach((node, i) => {
    const [w, h] = known(node.budget) ? MEMORY : SWITCH;
    places[node.name] = {node, w, h, x: left + column * (width - 2 * left) / Math.max(1, columns.length - 1), y: height / 2 + (i - (nodes.length - 1) / 2) * ROW};
  }));
  m.nodes.filter(node => node.kind === "rc").forEach(node => {
    const own = m.links.filter(link => link.from === node.name && places[link.to]?.node.kind === "device").map(link => places[link.to].y);
    if (own.length) places[node.name].y = own.reduce((sum, y) => sum + y, 0) / own.length;
  });
  return [places, height];
}

function machine() {
  const m = facts.machine, [places, height] = placed(m, at("machine-chart").clientWidth), nodes = Object.values(places);
  at("machine-note").textContent = (m.more_hosts > 0 ? `The first of ${m.more_hosts + 1} hosts. ` : "") + "Boxes are filled as far as the peak fills their memory; a link has the share of the step in which it is busy.";
  at("machine-chart").style.height = height + "px";
  const links = m.links.filter(link => link.from !== link.to && places[link.from] && places[link.to]);
  const both = name => m.links.find(link => link.from === name && link.to === name);  // what two directions share
  const ink = colour("--ink"), faint = colour("--faint"), raised = colour("--raised"), filled = colour("--filled");
  const text = (words, x, y, size, fill, align = "center") => ({type: "text", silent: true, style: {text: words, x, y, fill, align, verticalAlign: "middle", fontSize: size}});
  const drawLink = params => {
    const link = links[params.dataIndex], from = places[link.from], to = places[link.to], way = from.x < to.x ? 1 : -1;
    const x1 = from.x + way * from.w / 2, x2 = to.x - way * to.w / 2, y1 = from.y - 6 * way, y2 = to.y - 6 * way, bend = (x2 - x1) / 2;
    const stroke = link.busy > 0.5 ? "#d55e00" : link.busy > 0.1 ? "#e69f00" : faint, opacity = link.bytes ? 1 : 0.4;
    const rightHasMore = nodes.filter(node => node.x === Math.max(from.x, to.x)).length >= nodes.filter(node => node.x === Math.min(from.x, to.x)).length;
    const near = rightHasMore === (way > 0) ? 0.75 : 0.25, at_ = y1 + (y2 - y1) * near * near * (3 - 2 * near);  // of the curve, where the links of a fan are apart
    return {type: "group", children: [
      {type: "bezierCurve", shape: {x1, y1, x2: x2 - 7 * way, y2, cpx1: x1 + bend, cpy1: y1, cpx2: x2 - bend, cpy2: y2}, style: {stroke, fill: "none", lineWidth: 1 + 5 * link.busy, opacity}},
      {type: "polygon", shape: {points: [[x2, y2], [x2 - 9 * way, y2 - 4], [x2 - 9 * way, y2 + 4]]}, style: {fill: stroke, opacity}},
      ...(link.bytes ? [text(percent(link.busy), x1 + (x2 - x1) * near, at_ - 9 * way, 10, ink)] : []),
    ]};
  };
  const drawNode = params => {
    const {node, x, y, w, h} = nodes[params.dataIndex], shape = {x: x - w / 2, y: y - h / 2, width: w, height: h, r: 5}, shared = both(node.name);
    const title = TITLES[node.kind] ? `${TITLES[node.kind]} ${node.kind === "rc" ? node.name.slice(2) : ""}` : node.name;
    const second = known(node.budget) ? `${bytes(node.peak)} of ${bytes(node.budget)}` : shared && shared.bytes ? `both ways ${percent(shared.busy)}` : "";
    const share = known(node.budget) && node.budget ? Math.min(1, node.peak / node.budget) : 0;
    return {type: "group", children: [
      {type: "rect", shape, style: {fill: raised}},
      {type: "rect", silent: true, shape: {...shape, width: w * share}, style: {fill: filled}},
      {type: "rect", silent: true, shape, style: {fill: "none", stroke: node.kind === "device" ? "#0072b2" : known(node.budget) ? "#009e73" : faint, lineWidth: known(node.budget) ? 2 : 1}},
      text(title, x, second ? y - 8 : y, 12, ink),
      ...(second ? [text(second, x, y + 9, 11, ink)] : []),
    ]};
  };
  const hidden = {type: "value", show: false, min: 0};
  chart("machine-chart", {
    grid: {left: 0, right: 0, top: 0, bottom: 0}, xAxis: {...hidden, max: 1}, yAxis: {...hidden, max: 1},
    tooltip: tip({formatter: item => item.seriesIndex === 0
      ? `<b>${escaped(links[item.dataIndex].name)}</b><br>${bytes(links[item.dataIndex].bytes)} a step, busy ${percent(links[item.dataIndex].busy)} of it<br>${bytes(links[item.dataIndex].bandwidth)}/s`
      : escaped(nodes[item.dataIndex].node.name)}),
    series: [
      {type: "custom", data: links.map(() => [0, 0]), renderItem: drawLink},
      {type: "custom", data: nodes.map(() => [0, 0]), renderItem: drawNode},
    ],
  });
  table("links", ["link", "from", "to", "busy", "bytes a step", "bandwidth"],
    m.links.map(l => [l.name, l.from, l.to, percent(l.busy), bytes(l.bytes), bytes(l.bandwidth) + "/s"]));
}

// --- timeline and program

function gather() {
  lineText = [];
  facts.roles.forEach(role => role.lines.forEach((line, i) => { lineText[role.first + i] = line; }));
  spans = [];
  const add = (packed, isMeasured) => packed && packed.line.forEach((line, i) => {
    const stream = packed.stream[i], [op, kind] = facts.ops[line];
    const start = packed.start[i] * facts.unit_s;
    spans.push({stream, start, end: start + packed.length[i] * facts.unit_s, line, op, kind, measured: isMeasured, device: facts.streams[stream][0]});
  });
  add(facts.predicted, false);
  add(facts.measured, true);
  spans.sort((a, b) => a.measured - b.measured || a.stream - b.stream || a.start - b.start);
  spans.forEach((span, i) => { span.index = i; });
  const last = spans.reduce((most, span) => Math.max(most, span.end), facts.unit_s), digit = 10 ** (Math.floor(Math.log10(last)) - 2);
  wholeEnd = Math.ceil(last / digit) * digit;
  spansOf = new Map();
  spans.forEach(span => { if (!spansOf.has(span.line)) spansOf.set(span.line, []); spansOf.get(span.line).push(span); });
}

const name = span => `${facts.device_names[span.device]} ${facts.streams[span.stream][1]}`;

function describe(span) {
  return `<b>${escaped(name(span))}</b> ${span.measured ? "measured" : "predicted"}<br>` +
    `from ${seconds(span.start)}, ${seconds(span.end - span.start)} long<br>` +
    `<code>${escaped(lineText[span.line].trim())}</code>`;
}

function producersOf(span) {
  const found = [];
  (facts.producers[span.line] || []).forEach(line => {
    const lane = facts.device_lane[span.device];
    (spansOf.get(line) || []).forEach(other => {
      if (other.measured === span.measured && (other.device === span.device || facts.device_lane[other.device] === lane)) found.push(other);
    });
  });
  return found;
}

const arrow = (from, to) => [from.end, to.start, from.stream, to.stream, to.measured ? 1 : 0];
const arrows = list => list.flatMap(span => producersOf(span).map(other => arrow(other, span)));

function consumersOf(span) {
  const found = [];
  for (const [line, before] of Object.entries(facts.producers)) {
    if (before.includes(span.line)) (spansOf.get(Number(line)) || []).forEach(other => {
      if (other.measured === span.measured && producersOf(other).includes(span)) found.push(other);
    });
  }
  return found;
}

function band(api, row, isMeasured) {
  const height = api.size([0, 1])[1] * 0.8, middle = api.coord([0, row])[1];
  if (!facts.measured) return [middle - height / 2, height];
  return isMeasured ? [middle, height / 2 - 1] : [middle - height / 2, height / 2 - 1];
}

function timeline() {
  const rows = facts.streams.map(([device, stream]) => `${facts.device_names[device]} ${stream}`);
  const part = {};
  const height = Math.max(260, Math.min(34 * rows.length, Math.max(790, 14 * rows.length)) + 110);
  at("timeline-chart").style.height = height + "px";
  at("code").style.height = Math.min(900, height) + "px";
  at("timeline-note").textContent = facts.measured ? "In each row predicted above measured." : "Predicted; a measured step will stand below it.";
  const used = new Set(spans.map(span => span.kind));
  at("legend").replaceChildren(...Object.keys(KINDS).filter(kind => used.has(kind)).map(kind => {
    const entry = make("span"), box = make("i");
    box.style.background = KINDS[kind];
    entry.append(box, kind);
    return entry;
  }));
  let lastRow = -1, lastPixel = -1;
  const ink = colour("--ink"), strong = colour("--strong");
  const drawn = chart("timeline-chart", {
    grid: {left: 110, right: 16, top: 8, bottom: 64},
    tooltip: tip({trigger: "item", formatter: item => item.seriesIndex === 0 ? describe(spans[item.value[3]]) : ""}),
    xAxis: timeAxis({min: 0, max: wholeEnd}),
    yAxis: axis({type: "category", inverse: true, data: rows, axisLabel: {color: colour("--faint"), interval: 0}, splitLine: {show: true, lineStyle: {color: colour("--line")}}}),
    dataZoom: [
      {type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: "shift", minSpan: LEAST, start: view[0], end: view[1]},
      {type: "slider", filterMode: "weakFilter", start: view[0], end: view[1], height: 18, bottom: 8, brushSelect: false, showDetail: false, textStyle: {color: colour("--faint")}},
    ],
    series: [
      {
        type: "custom", encode: {x: [0, 1], y: 2}, clip: true, progressive: 0,
        data: spans.map(span => [span.start, span.end, span.stream, span.index]),
        renderItem: (params, api) => {
          const span = spans[api.value(3)], [from, to] = [span.start, span.end].map(time => Math.round(api.coord([time, 0])[0]));
          const isNarrow = to - from < 2, x = isNarrow ? from - from % 2 : from, end = isNarrow ? x + 2 : to;
          const row = span.stream + (span.measured ? 1e6 : 0);
          if (params.dataIndexInside === 0 || row !== lastRow) { lastRow = row; lastPixel = -1e9; }
          if (end <= lastPixel && span.index !== chosen) return null;  // it would cover no pixel that is not drawn
          lastPixel = end;
          const [y, height] = band(api, span.stream, span.measured), width = end - x;
          const rect = {
            type: "rect", shape: {x, y, width: width > 3 ? width - 1 : width, height},  // neighbours are told apart
            style: {fill: KINDS[span.kind], opacity: span.measured ? 0.75 : 1, stroke: span.index === chosen ? ink : undefined, lineWidth: span.index === chosen ? 3 : 0},
            emphasis: {style: {stroke: ink, lineWidth: 2}},
          };
          if (width < 46 || height < 9) return rect;
          return {type: "group", children: [rect, {
            type: "text", silent: true,
            style: {text: span.op, x: Math.max(x, params.coordSys.x) + 4, y: y + height / 2, verticalAlign: "middle", fill: span.kind === "backward" ? "#fff" : "#000", fontSize: Math.min(11, height), width: width - 8, overflow: "truncate"},
          }]};
        },
      },
      {
        type: "custom", id: "arrows", silent: true, clip: true, encode: {x: [0, 1]}, data: [], z: 5,
        renderItem: (params, api) => {
          const [from, to, row, other, measured] = [0, 1, 2, 3, 4].map(i => api.value(i));
          const middle = stream => { const [y, height] = band(api, stream, measured); return y + (row === other ? height - 3 : height / 2); };
          const x1 = api.coord([from, 0])[0], x2 = api.coord([to, 0])[0], y1 = middle(row), y2 = middle(other), bend = Math.max(14, Math.abs(x2 - x1) / 3);
          return {type: "group", children: [
            {type: "bezierCurve", shape: {x1, y1, x2, y2, cpx1: x1 + bend, cpy1: y1, cpx2: x2 - bend, cpy2: y2}, style: {stroke: strong, fill: "none", lineWidth: 1.4, opacity: 0.8}},
            {type: "polygon", shape: {points: [[x2, y2], [x2 - 7, y2 - 3.5], [x2 - 7, y2 + 3.5]]}, style: {fill: strong}},
          ]};
        },
      },
    ],
  });
  drawn.on("click", event => { if (event.seriesIndex === 0) choose(event.value[3], true); });
  drawn.on("mouseover", event => { if (event.seriesIndex === 0) light(spans[event.value[3]], true); });
  drawn.on("datazoom", event => zoomed(event, window.memoryChart));
  if (chosen >= 0) showArrows();
}

// One chart over time was zoomed: the other one follows.
function zoomed(event, other) {
  if (following) return;
  const found = event.batch ? event.batch[0] : event;
  view = [found.start, found.end];
  following = true;
  if (other) other.dispatchAction({type: "dataZoom", start: view[0], end: view[1]});
  following = false;
  showArrows();
}

const FEW = 30;  // spans in view, of which all arrows are shown where none is chosen

function showArrows() {
  let found = [];
  if (chosen >= 0) {
    const own = spans[chosen];
    found = [...arrows([own]), ...consumersOf(own).map(other => arrow(own, other))];
  } else {
    const [start, end] = view.map(share => share / 100 * wholeEnd), seen = [];
    for (const span of spans) {
      if (span.end >= start && span.start <= end) seen.push(span);
      if (seen.length > FEW) break;
    }
    if (seen.length <= FEW) found = arrows(seen);
  }
  drawn["timeline-chart"].setOption({series: [{}, {id: "arrows", data: found}]});
}

function zoom(factor, shift) {
  const part = drawn["timeline-chart"], [start, end] = view;
  const of = chosen < 0 ? -1 : 50 * (spans[chosen].start + spans[chosen].end) / wholeEnd, isAround = factor < 1 && of > start && of < end;
  const middle = isAround ? of : (start + end) / 2 + shift * (end - start);  // what is chosen stays in view
  const half = Math.min(50, Math.max(LEAST / 2, (end - start) / 2 * factor));
  const first = Math.min(Math.max(0, middle - half), 100 - 2 * half);
  part.dispatchAction({type: "dataZoom", dataZoomIndex: 0, start: first, end: first + 2 * half});
}

function choose(index, follow) {
  chosen = index;
  const span = spans[index];
  light(span, true);
  at("chosen").textContent = `${name(span)}, ${span.measured ? "measured" : "predicted"}: ${lineText[span.line].trim()} — from ${seconds(span.start)}, ${seconds(span.end - span.start)}`;
  if (follow) {
    const [start, end] = view, middle = 50 * (span.start + span.end) / wholeEnd;
    if (middle < start || middle > end) zoom(1, (middle - (start + end) / 2) / (end - start));
  }
  redrawSpans();
}

function redrawSpans() {
  drawn["timeline-chart"].setOption({series: [{data: spans.map(each => [each.start, each.end, each.stream, each.index])}]});
  showArrows();
}

function chooseNone() {
  chosen = -1;
  at("chosen").textContent = "";
  at("code").querySelectorAll(".lit").forEach(line => line.classList.remove("lit"));
  drawn["timeline-chart"].dispatchAction({type: "hideTip"});
  redrawSpans();
}

function showProgram(device) {
  const role = facts.roles[facts.device_role[device]];
  at("device").value = String(device);
  if (at("code").dataset.role === String(facts.device_role[device])) { at("code").dataset.device = device; return; }
  at("code").dataset.role = facts.device_role[device];
  at("code").dataset.device = device;
  at("code").replaceChildren(...role.lines.map((text, i) => {
    const line = make("span", text || " ", spansOf.has(role.first + i) ? "op" : "note");
    line.dataset.line = role.first + i;
    return line;
  }));
}

function light(span, scroll) {
  showProgram(span.device);
  at("code").querySelectorAll(".lit").forEach(line => line.classList.remove("lit"));
  const line = at("code").querySelector(`[data-line="${span.line}"]`);
  if (!line) return;
  line.classList.add("lit");
  if (scroll) at("code").scrollTop = line.offsetTop - at("code").offsetTop - at("code").clientHeight / 2;
}

function chooseLine(line) {
  const own = (spansOf.get(line) || []).filter(span => span.device === Number(at("code").dataset.device));
  if (own.length) choose(own[0].index, true);
}

function neighbour(step) {
  if (chosen < 0) return choose(0, true);
  const span = spans[chosen], next = spans[chosen + step];
  choose(next && next.measured === span.measured ? chosen + step : chosen, true);
}

function stepLine(step) {
  const lines = [...at("code").querySelectorAll(".op")], now = lines.findIndex(line => line.classList.contains("lit"));
  const next = lines[Math.min(lines.length - 1, Math.max(0, now + step))];
  if (next) chooseLine(Number(next.dataset.line));
}

// --- memory

function memory() {
  const m = facts.memory[Number(at("which").value) || 0];
  if (!m) return;
  const measured = facts.verdict.peaks.find(p => p.name === m.name)?.measured;
  at("memory-note").textContent = "Predicted: bytes over the simulated step, from the op that makes a value to the last that reads it." +
    (known(measured) ? ` The last step held at most ${bytes(measured)}, as measured.` : " Nothing was measured.");
  const points = m.points.map(([time, num]) => [time * facts.unit_s, num]);
  points.push([wholeEnd, points.length ? points.at(-1)[1] : 0]);
  const peak = points.reduce((most, point) => Math.max(most, point[1]), 0), step = bytesStep(1.05 * (m.budget && m.budget < 3 * peak ? Math.max(peak, m.budget) : peak));
  const at_ = time => {
    const now = Math.round(time / facts.unit_s), held = m.values.filter(([, , from, to]) => from <= now && now <= to).sort((a, b) => b[1] - a[1]);
    const lasting = Object.entries(m.lasting).filter(([, num]) => num).map(([what, num]) => [what === "arena" ? "arena, of values that come and go" : what + " (lasting)", num]);
    const rows = [...lasting, ...held.slice(0, 12).map(([text, num]) => [text, num])];
    const more = held.length > 12 ? `<br>and ${held.length - 12} more` : "";
    return rows.map(([text, num]) => `${escaped(text)}: ${bytes(num)}`).join("<br>") + more;
  };
  const part = chart("memory-chart", {
    grid: {left: 110, right: 16, top: 24, bottom: 40},
    tooltip: tip({trigger: "axis", axisPointer: {type: "line"}, formatter: items => `<b>${escaped(m.name)}</b> at ${seconds(items[0].value[0])}: ${bytes(items[0].value[1])}<br>${at_(items[0].value[0])}`}),
    xAxis: timeAxis({min: 0, max: wholeEnd}),
    yAxis: axis({type: "value", min: 0, interval: step, max: value => step * Math.max(1, Math.ceil(1.05 * Math.max(value.max, m.budget && m.budget < 3 * value.max ? m.budget : 0) / step)), axisLabel: {color: colour("--faint"), formatter: bytes}}),
    dataZoom: [{type: "inside", filterMode: "none", minSpan: LEAST, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: "shift", start: view[0], end: view[1]}],
    series: [{
      type: "line", step: "end", symbol: "none", data: points, lineStyle: {color: "#0072b2", width: 1.5}, areaStyle: {color: "#56b4e9", opacity: 0.35},
      markLine: m.budget ? {silent: true, symbol: "none", data: [{yAxis: m.budget}], lineStyle: {color: "#d55e00", type: "dashed", width: 2}, label: {formatter: `budget ${bytes(m.budget)}`, color: colour("--ink"), position: "insideEndTop"}} : undefined,
    }],
  });
  window.memoryChart = part;
  part.on("datazoom", event => zoomed(event, drawn["timeline-chart"]));
}

// --- bars

const SPENT = {"computation": ["#0072b2", "none"], "optimizer": ["#009e73", "circle"], "exposed transfers": ["#e69f00", "rect"], "bubble": ["#999999", "triangle"]};

function spent() {
  const rows = facts.spent, v = facts.verdict;
  at("spent-note").textContent = (facts.measured ? "Seconds of the predicted step. " : "") + (v.bound_s
    ? `The dashed line is a lower bound (${v.bound_by}): no plan for this machine is faster with the kernels of PyTorch's calls. A step reaches it where nothing else is waited for; ${v.could_save}.`
    : "No lower bound is known.");
  at("spent-chart").style.height = Math.max(180, 26 * rows.length + 110) + "px";
  const line = (value, text) => ({xAxis: value, label: {formatter: text, color: colour("--ink"), position: "start"}});
  chart("spent-chart", {
    grid: {left: 110, right: 40, top: 56, bottom: 28}, legend: {top: 0, textStyle: {color: colour("--ink")}},
    aria: {enabled: true, label: {enabled: false}, decal: {show: true}},
    tooltip: tip({trigger: "axis", axisPointer: {type: "shadow"}, valueFormatter: seconds}),
    xAxis: timeAxis(),
    yAxis: axis({type: "category", inverse: true, data: rows.map(row => row.device), axisLabel: {color: colour("--faint"), interval: 0}}),
    series: Object.entries(SPENT).map(([kind, [fill]], i) => ({
      name: kind, type: "bar", stack: "step", data: rows.map(row => row[kind]), itemStyle: {color: fill}, barMaxWidth: 22,
      markLine: i || !v.bound_s ? undefined : {symbol: "none", precision: 15, silent: true, lineStyle: {color: "#d55e00", type: "dashed", width: 2}, data: [line(v.bound_s, `bound ${seconds(v.bound_s)}`)]},
    })),
  });
  table("spent-table", ["device", ...Object.keys(SPENT)], rows.map(row => [row.device, ...Object.keys(SPENT).map(kind => seconds(row[kind]))]));
}

function bars(id, rows, best) {
  at(id).hidden = rows.length < 2;
  if (at(id).hidden) return;
  at(id).style.height = Math.max(120, 24 * rows.length + 60) + "px";
  const letters = rows.reduce((most, row) => Math.max(most, row.name.length), 0), room = Math.min(420, 6.5 * letters + 10, at(id).clientWidth * 0.45);
  chart(id, {
    grid: {left: room + 16, right: 70, top: 8, bottom: 28},
    tooltip: tip({trigger: "axis", axisPointer: {type: "shadow"}, formatter: items => `<b>${escaped(rows[items[0].dataIndex].name)}</b><br>${escaped(rows[items[0].dataIndex].reason || seconds(rows[items[0].dataIndex].step_s))}`}),
    xAxis: timeAxis(),
    yAxis: axis({type: "category", inverse: true, data: rows.map(row => row.name), axisLabel: {color: colour("--ink"), interval: 0, width: room, overflow: "truncate", fontSize: 11}}),
    series: [{
      type: "bar", barMaxWidth: 16, data: rows.map(row => ({value: row.step_s, itemStyle: {color: row.name === best ? "#009e73" : "#56b4e9"}})),
      label: {show: true, position: "right", formatter: item => seconds(item.value), color: colour("--ink"), fontSize: 11},
    }],
  });
}

function rivals() {
  const own = {name: "this plan", step_s: facts.verdict.step_s, reason: ""};
  const timed = facts.rivals.filter(row => known(row.step_s)).slice(0, 14).map(row => ({...row, reason: [row.reason, row.differs].filter(Boolean).join("; ")}));
  at("rivals-note").textContent = facts.rivals.length ? "Other plans that were simulated, the fastest first." : "Nothing else was simulated: the strategy or the plan was given.";
  at("rivals-why").hidden = !facts.rivals.length;
  bars("rivals-chart", [own, ...timed], own.name);
  table("rivals-table", ["plan", "step", "what differs", "why it lost"], facts.rivals.map(row => [row.name, seconds(row.step_s), row.differs || "", row.reason]));
}

function whatIf() {
  const own = {name: `this machine (${facts.verdict.hardware})`, step_s: facts.verdict.step_s, reason: ""};
  const rows = facts.helps.filter(row => known(row.step_s)).map(row => ({name: row.change, step_s: row.step_s, reason: row.reason}));
  const others = facts.machines.filter(row => known(row.step_s) && row.machine !== facts.verdict.hardware).map(row => ({name: row.machine, step_s: row.step_s, reason: ""}));
  at("whatif-note").textContent = rows.length || others.length ? "The same model, planned anew for a machine with more of one thing, or for other machines." : "Nothing else was planned.";
  bars("whatif-chart", [own, ...rows, ...others].sort((a, b) => a.step_s - b.step_s), own.name);
  const money = row => known(row.price_dollars_per_hour) ? `${row.price_dollars_per_hour} $ an hour` : known(row.price_dollars) ? `${three(row.price_dollars)} $` : "not known";
  const per = row => known(row.tokens_per_dollar_of_rent) ? three(row.tokens_per_dollar_of_rent) + " tokens a dollar" : known(row.tokens_per_s_per_1000_dollars) ? three(row.tokens_per_s_per_1000_dollars) + " tokens/s for 1000 $" : "";
  if (facts.machines.length) table("machines-table", ["machine", "step", "tokens a second", "price", "for the money", ""],
    facts.machines.map(row => [row.machine, seconds(row.step_s), known(row.tokens_per_s) ? three(row.tokens_per_s) : "", money(row), per(row), row.reason || ""]));
}

// --- all of it

function draw() {
  machine(); timeline(); memory(); spent(); rivals(); whatIf();
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  at("theme").textContent = isDark ? "Light" : "Dark";
}

async function begin() {
  facts = await decoded();
  gather();
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  setTheme(scheme.matches);
  scheme.onchange = () => { setTheme(scheme.matches); draw(); };
  verdict(); stages();
  facts.device_names.forEach((text, i) => { const option = make("option", text); option.value = i; at("device").append(option); });
  facts.memory.forEach((m, i) => { const option = make("option", m.name); option.value = i; at("which").append(option); });
  showProgram(0);
  draw();
  at("theme").onclick = () => { setTheme(document.documentElement.dataset.theme !== "dark"); draw(); };
  // The wheel alone scrolls the page, also over a chart that it zooms together with a key.
  ["timeline-chart", "memory-chart"].forEach(id => ["wheel", "mousewheel"].forEach(kind => at(id).addEventListener(
    kind, event => { if (!event.ctrlKey && !event.shiftKey) event.stopPropagation(); }, {capture: true, passive: true})));
  document.querySelector("nav").addEventListener("click", event => {  // in a notebook's frame an anchor would leave it
    const link = event.target.closest("a");
    if (link && location.protocol === "about:") { event.preventDefault(); document.querySelector(link.hash).scrollIntoView(); }
  });
  at("device").onchange = event => showProgram(Number(event.target.value));
  at("which").onchange = memory;
  at("in").onclick = () => zoom(0.5, 0);
  at("out").onclick = () => zoom(2, 0);
  at("whole").onclick = () => zoom(1e9, 0);
  const keys = {"+": () => zoom(0.5, 0), "=": () => zoom(0.5, 0), "-": () => zoom(2, 0), "0": () => zoom(1e9, 0), "ArrowLeft": () => zoom(1, -0.25), "ArrowRight": () => zoom(1, 0.25), "n": () => neighbour(1), "p": () => neighbour(-1), "Escape": chooseNone};
  at("timeline-chart").addEventListener("keydown", event => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); } });
  at("code").addEventListener("keydown", event => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (step) { event.preventDefault(); stepLine(step); }
    if (event.key === "Escape") chooseNone();
  });
  at("code").addEventListener("click", event => { const line = event.target.closest(".op"); if (line) chooseLine(Number(line.dataset.line)); });
  at("code").addEventListener("mouseover", event => {
    const line = event.target.closest(".op"), part = drawn["timeline-chart"];
    part.dispatchAction({type: "hideTip"});
    part.dispatchAction({type: "downplay", seriesIndex: 0});
    const own = line && (spansOf.get(Number(line.dataset.line)) || []).filter(span => span.device === Number(at("code").dataset.device));
    if (!own || !own.length) return;
    part.dispatchAction({type: "highlight", seriesIndex: 0, dataIndex: own.map(span => span.index)});
    part.dispatchAction({type: "showTip", seriesIndex: 0, dataIndex: own[0].index});
  });
  let resized;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(draw, 100); });
  let before;  // of printing, which is on white and as wide as paper
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; document.documentElement.dataset.paper = "yes"; setTheme(false); draw(); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.paper; setTheme(before === "dark"); draw(); });
  document.documentElement.dataset.ready = "yes";
}
begin();
