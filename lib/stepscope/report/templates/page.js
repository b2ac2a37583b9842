// What the page does: marks where one is, sorts and filters long tables, opens what a link or the printer asks for.
'use strict';
(() => {
  // Marks, in the contents at the side, the section that one is in, and keeps it in view there.
  const side = document.querySelector('.side');
  const links = [...side.querySelectorAll('a')];
  const headings = links.map(link => document.getElementById(decodeURIComponent(link.hash.slice(1))));
  function mark() {
    const link = links[Math.max(0, headings.findLastIndex(heading => heading.getBoundingClientRect().top < 120))];
    if (!link || link.hasAttribute('aria-current')) return;
    links.forEach(other => other.removeAttribute('aria-current'));
    link.setAttribute('aria-current', 'location');
    const at = link.getBoundingClientRect();
    if (at.top < 0 || at.bottom > side.clientHeight) side.scrollTop += at.top - side.clientHeight / 3;
  }
  addEventListener('scroll', mark, {passive: true});
  mark();

  // On a phone the contents cover what they lead to.
  const top = document.querySelector('details.top');
  top.addEventListener('click', event => { if (event.target.closest('a')) top.open = false; });

  // What a link leads to may be folded.
  function unfold() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.matches('details')) at.open = true;
    target.scrollIntoView();
  }
  addEventListener('hashchange', unfold);
  unfold();

  // On paper nothing is folded. Older browsers need it done; the newer have it in the style.
  let opened = [];
  addEventListener('beforeprint', () => {
    opened = [...document.querySelectorAll('main details:not([open], .embedded)')];
    opened.forEach(details => { details.open = true; });
  });
  addEventListener('afterprint', () => { opened.forEach(details => { details.open = false; }); });

  // Numbers by their value, with their unit's thousands commas left out, whatever they stand before; else text.
  const number = text => {
    const found = text.replace(/(\d),(?=\d{3})/g, '$1').replace(/^[-−–](?=\d)/, '-').match(/^[^\d-]{0,2}(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)/i);
    return found ? Number(found[1]) : NaN;
  };
  const words = new Intl.Collator('en', {numeric: true});
  function sort(table, column, down) {
    const body = table.tBodies[0], sign = down ? -1 : 1;
    const keyed = [...body.rows].map(row => [row.cells[column]?.textContent.trim() ?? '', row]);
    const numeric = keyed.filter(([text]) => !Number.isNaN(number(text))).length * 2 > keyed.length;
    keyed.sort(([a], [b]) => {
      if (!numeric) return sign * words.compare(a, b);
      const x = number(a), y = number(b);
      return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) : sign * (x - y);  // what is no number is last
    });
    body.append(...keyed.map(([, row]) => row));
  }
  for (const table of document.querySelectorAll('table.long-table')) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector('button');
      button?.addEventListener('click', () => {
        const down = head.getAttribute('aria-sort') === 'ascending';
        heads.forEach(other => other.removeAttribute('aria-sort'));
        head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
        sort(table, column, down);
      });
    });
    const filter = document.getElementById(`${table.id}-filter`), count = document.getElementById(`${table.id}-count`);
    filter.addEventListener('input', () => {
      const asked = filter.value.toLowerCase().split(/\s+/).filter(Boolean), rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const text = row.textContent.toLowerCase(), cells = [...row.cells].map(cell => cell.textContent.trim().toLowerCase());
        // A number is looked for as a whole cell's beginning: 128 is not 1280.
        row.hidden = !asked.every(word => /^[\d.]+$/.test(word) ? cells.some(cell => cell.split(/\s+/).includes(word)) : text.includes(word));
      }
      count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} rows`;
    });
  }
})();
