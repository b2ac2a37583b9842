// The ladder of one size and context, its products no narrower than asked for. Rows are as report.interactive.Rung.
'use strict';
(() => {
  const form = document.getElementById('ladder-form');
  if (!form) return;
  const rows = JSON.parse(document.getElementById('ladder-picker-data').textContent);
  const order = ['fp32', 'tf32', 'bf16', 'fp8'], choice = name => form.elements[name];
  const digits = (number, most = 3) => number === null ? '' : number >= 1000
    ? Math.round(number).toLocaleString('en') : String(Number(number.toPrecision(most)));

  function contexts() {  // only those that were measured at this size
    const found = new Set(rows.filter(row => row.size === choice('size').value).map(row => row.context_length));
    for (const option of choice('context').options) option.disabled = option.hidden = !found.has(Number(option.value));
    if (choice('context').selectedOptions[0].disabled)
      choice('context').value = [...choice('context').options].find(option => !option.disabled).value;
  }
  function show() {
    contexts();
    const most = order.indexOf(choice('products').value);
    const own = rows.filter(row => row.size === choice('size').value && row.context_length === Number(choice('context').value)
      && order.indexOf(row.products) <= most);
    const rungs = own.filter(row => !row.beside), first = rungs[0];
    const best = rungs.reduce((a, b) => b.time_ms < a.time_ms ? b : a, first);
    document.querySelector('#ladder-rows tbody').replaceChildren(...own.map(row => {
      const line = document.createElement('tr'), bar = document.createElement('i');
      line.className = row === best ? 'best' : row.beside ? 'beside' : '';
      bar.hidden = !first || row.rung === 'fill';  // whose step has another batch
      if (!bar.hidden) bar.style.width = `${Math.min(100, 100 * row.time_ms / first.time_ms)}%`;
      const cells = [row.label, digits(row.time_ms), bar, row.gain === null ? '' : `${row.gain.toFixed(2)}x`, digits(row.tokens_per_s),
        digits(row.peak_gib), row.mfu === null ? '' : `${Math.round(100 * row.mfu)}%`];
      cells.forEach((content, column) => {
        const cell = document.createElement('td');
        cell.className = column === 0 ? '' : content === bar ? 'bar' : 'number';
        cell.append(content);
        line.append(cell);
      });
      return line;
    }));
    document.getElementById('ladder-said').textContent = !first ? 'Not measured.'
      : first === best ? `${digits(first.time_ms)} ms a step.`
        : `${digits(first.time_ms)} ms to ${digits(best.time_ms)} ms a step: ${digits(best.faster ?? first.time_ms / best.time_ms)}x faster, with ${best.label}.`;
  }
  form.addEventListener('input', show);
  form.addEventListener('submit', event => event.preventDefault());
  show();
})();
