// Whether a text ends in a repetition: the same characters at least four times, over 400 characters.

export const MAX_PERIOD = 400, MIN_REPEATS = 4, MIN_CHARACTERS = 400;

export function repeats(text) {
  for (let period = 1; period <= MAX_PERIOD; period++) {
    const length = Math.max(MIN_CHARACTERS, MIN_REPEATS * period);
    if (length > text.length) return false;
    if (endsPeriodically(text, period, length)) return true;
  }
  return false;
}

function endsPeriodically(text, period, length) {
  for (let index = text.length - 1; index >= text.length - length + period; index--) {
    if (text[index] !== text[index - period]) return false;
  }
  return true;
}
