
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
