// Numbers, sizes and times as text.

const NONE = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(1);
  return Number(value.toPrecision(digits)).toString();
}

export function whole(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : NONE;
}

export function bytes(value) {
  if (!Number.isFinite(value)) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value < 0.9995) return `${number(value * 1000, 3)} ms`;
  if (value < 60) return `${number(value, 3)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// A time on an axis.
export function axisSeconds(value) {
  if (value < 120) return `${number(value, 3)} s`;
  if (value < 7200) return `${number(value / 60, 3)} min`;
  return `${number(value / 3600, 3)} h`;
}

export function percent(value, digits = 0) {
  return Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : NONE;
}

export function clock(unix_s) {
  return new Date(unix_s * 1000).toLocaleTimeString("en-GB");
}

export function count(value, one, many = `${one}s`) {
  return `${whole(value)} ${value === 1 ? one : many}`;
}
