"use strict";
// What the report and the live page say alike.
const at = id => document.getElementById(id);
const make = (tag, text, kind) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const known = value => value !== null && value !== undefined;
const percent = share => share > 0 && share < 5e-4 ? "<0.1%" : (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + "%";
const seconds = s => !known(s) ? "" : s === 0 ? "0 s" : s >= 1 ? s.toPrecision(s >= 100 ? 4 : 3) + " s"
  : s >= 1e-3 ? (1e3 * s).toPrecision(3) + " ms" : (1e6 * s).toPrecision(3) + " µs";
const bytes = count => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; count >= 1024 && unit + 1 < units.length; unit++) count /= 1024;
  return (unit ? count.toPrecision(count >= 1000 ? 4 : 3) : Math.round(count)) + " " + units[unit];
};
