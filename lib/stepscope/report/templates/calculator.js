// "Does it fit?": the memory formulas of stepscope.step.accounting, whose terms are this page's data. All sums
// are of whole bytes, and exact, so BigInt; names are those of the Python.
'use strict';
const fits = (() => {
  const MIB = 2n ** 20n;
  const up = (number, step) => (number + step - 1n) / step * step;

  function terms(data, config) {
    const sizes = {...config, head_dim: Math.floor(config.d_model / config.num_heads)};
    return Object.fromEntries(Object.entries(data.letters).map(
      ([letter, names]) => [letter, names.reduce((product, name) => product * BigInt(sizes[name]), 1n)]));
  }
  function value(formula, letters) {
    return formula.reduce((sum, [bytes, letter]) => sum + BigInt(bytes) * letters[letter], 0n);
  }
  function parameterCount(config) {
    const [c, f, v, l] = ['d_model', 'd_ff', 'vocab_size', 'num_layers'].map(name => BigInt(config[name]));
    return 2n * v * c + l * (4n * c * c + 3n * c * f + 2n * c) + c;
  }
  // What the caching allocator takes beyond so many tensors of a size.
  function rounding(size, number) {
    const exact = up(size, 512n);
    if (size <= MIB) return number * (exact - size);
    const segment = exact >= 10n * MIB ? up(exact, 2n * MIB) : 20n * MIB;
    const fit = segment / exact, left = segment - fit * exact;
    return number * (exact - size) + (left <= MIB ? number / fit * left : 0n);
  }
  function parameterRounding(config, letters) {
    const l = BigInt(config.num_layers), counts = {A: 4n * l, M: 3n * l, E: 2n, C: 2n * l + 1n};
    return Object.entries(counts).reduce((sum, [letter, n]) => sum + rounding(4n * letters[letter], n), 0n);
  }
  // As Python rounds a quotient: to the nearest, halves to even.
  function quotient(number, by) {
    const whole = number / by, twice = 2n * (number % by);
    return whole + (twice > by || (twice === by && whole % 2n) ? 1n : 0n);
  }

  // The instant of a steady step at which most is allocated: phase, layer (null outside the blocks), operation,
  // bytes by category, and their sum.
  function peak(data, config) {
    const f = data.formulas[config.attention][data.of_precision[config.precision]], letters = terms(data, config);
    const known = new Map();
    const of = formula => {
      if (!known.has(formula)) known.set(formula, value(formula, letters));
      return known.get(formula);
    };
    const layers = config.num_layers, again = config.blocks_per_checkpoint, k = again || layers;
    const training = config.mode !== 'forward', step = config.mode === 'step', cuda = config.device === 'cuda';
    const weights = 4n * parameterCount(config), rounded = parameterRounding(config, letters);
    const sets = step ? 3n : 1n, counts = step && config.optimizer === 'fused' ? BigInt(9 * layers + 3) : 0n;
    const fixed = {
      parameters: weights, 'optimizer state': (step ? 2n * weights : 0n) + 4n * counts,
      other: 8n * letters.t + BigInt(config.context_length) ** 2n + 16n * letters.r,
      'allocator rounding': cuda ? sets * rounded + 508n * counts : 0n,
    };
    const saved = of(f.saved), copies = of(f.copies), logits = of(f.logits), stream = of(data.stream);
    const head = of(data.head_gradients), block = of(data.block_gradients), kernel = cuda ? of(f.kernel) : 0n;
    const workspace = cuda ? BigInt(data.workspace) * (training ? 2n : 1n) : 0n;
    const atRest = fixed.parameters + fixed['optimizer state'] + fixed.other;
    let top = null;
    function add(phase, layer, operation, total, {activations = 0n, copied = 0n, gradients = 0n, held = 0n, extra = 0n}) {
      let rounding = fixed['allocator rounding'];
      if (cuda) rounding += extra + (gradients ? quotient(rounded * gradients, weights) : 0n);
      const bytes = atRest + workspace + rounding + total + activations + copied + gradients;
      if (top && bytes <= top.bytes) return;  // most are: no object is made for them
      const categories = {...Object.fromEntries(data.categories.map(name => [name, 0n])), ...fixed,
        activations, 'autocast copies': copied, gradients, temporaries: total - held, other: fixed.other + held,
        'cuBLAS workspace': workspace, 'allocator rounding': rounding};
      top = {phase, layer, operation, categories, bytes};
    }
    const each = (formulas, make) => Object.entries(formulas).forEach(([name, formula]) => make(name, of(formula)));
    const n = number => BigInt(number), floor = (a, b) => Math.floor(a / b);

    const kept = again ? n(floor(layers - 1, k)) * stream : n(layers) * saved;
    for (let layer = 0; layer < layers; layer++) {
      const within = again ? n(floor(layer, k)) * stream : n(layer) * saved;
      each(training && !again ? f.forward : f.infer, (name, bytes) => add('forward', layer, name, bytes,
        {activations: training ? within : 0n, copied: n(layer) * copies}));
    }
    if (!training) {
      each(f.infer_head, (name, bytes) => add('forward', null, name, bytes, {copied: n(layers) * copies}));
      return top;
    }
    const cached = again ? 0n : n(layers) * copies;
    for (const [phase, formulas] of [['loss', f.loss], ['backward', f.backward_head]])
      each(formulas, (name, bytes) => add(phase, null, name, bytes, {activations: kept, copied: cached, held: logits}));
    for (let layer = layers - 1; layer >= 0; layer--) {
      const first = floor(layer, k) * k, below = n(floor(first, k)) * stream, done = head + n(layers - 1 - layer) * block;
      if (again && layer + 1 === Math.min(first + k, layers))
        for (let once = first; once <= layer; once++)
          each(f.forward, (name, bytes) => add('backward', once, `again ${name}`, bytes + stream + logits,
            {activations: below + n(once - first) * saved, copied: n(once - first) * copies, gradients: done, held: logits}));
      each(f.backward, (name, bytes) => add('backward', layer, name, bytes + (name === data.fused_backward ? kernel : 0n),
        {activations: below + n(layer - first) * saved, copied: n(layer - first) * copies, gradients: done, held: logits}));
    }
    each(f.backward_end, (name, bytes) => add('backward', null, name, bytes - head,
      {gradients: head + n(layers) * block, held: logits}));
    if (step) {
      const root = config.optimizer === 'foreach' ? weights : 0n;
      add('optimizer', null, root ? 'AdamW: foreach_sqrt' : 'AdamW', root + logits + 4n,
        {gradients: weights, held: logits + 4n, extra: root ? rounded : 0n});
    }
    return top;
  }

  // The largest number for which something holds that holds for all smaller ones; 0 for none.
  function largest(holds, most = 2 ** 24) {
    if (!holds(1)) return 0;
    let low = 1, high = 2;
    while (high <= most && holds(high)) [low, high] = [high, 2 * high];
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      [low, high] = holds(middle) ? [middle, high] : [low, middle];
    }
    return low;
  }
  const largestThatFits = (data, config, field, bytes) =>
    largest(number => peak(data, {...config, [field]: number}).bytes <= bytes);

  return {peak, largestThatFits, parameterCount};
})();

(() => {
  const form = document.getElementById('fits-form');
  if (!form) return;
  const data = JSON.parse(document.getElementById('calculator-data').textContent);
  const shape = ['d_model', 'd_ff', 'num_layers', 'num_heads'], field = name => form.elements[name];
  const numbers = [...shape, 'vocab_size', 'context_length', 'batch_size', 'blocks_per_checkpoint'];
  const gib = bytes => `${(Number(bytes) / 2 ** 30).toFixed(2)} GiB`;
  const many = number => number >= 1e9 ? `${(number / 1e9).toPrecision(3)} billion` : `${(number / 1e6).toPrecision(3)} million`;
  const show = (id, text) => { document.getElementById(id).textContent = text; };
  const PHASES = {forward: 'forward', loss: 'the loss', backward: 'backward', optimizer: 'the optimizer'};

  function read() {
    const config = {device: 'cuda', mode: field('mode').value, precision: field('precision').value,
      attention: field('attention').value, optimizer: field('optimizer').value};
    for (const name of numbers) {
      const number = field(name).valueAsNumber, least = Number(field(name).min), most = Number(field(name).max);
      if (!Number.isInteger(number) || number < least || number > most)
        throw new RangeError(`${field(name).labels[0].textContent.trim()}: a whole number from ${least} to ${most}.`);
      config[name] = number;
    }
    if (config.d_model % config.num_heads || config.d_model / config.num_heads % 2)
      throw new RangeError('Heads: d_model / heads must be an even whole number.');
    if (config.blocks_per_checkpoint > config.num_layers)
      throw new RangeError('Blocks a checkpoint: at most as many as there are layers.');
    if (config.mode === 'forward') config.blocks_per_checkpoint = 0;
    const memory = field('memory_gib').valueAsNumber;
    if (!(memory > 0 && memory < 1e6)) throw new RangeError('GPU memory: a number of GiB above 0.');
    return [config, BigInt(Math.round(memory * 2 ** 30))];
  }

  function bars(categories, whole) {
    const list = document.getElementById('fits-parts');
    list.replaceChildren(...Object.entries(categories).filter(([, bytes]) => bytes).sort((a, b) => Number(b[1] - a[1]))
      .map(([name, bytes]) => {
        const row = document.createElement('li'), bar = document.createElement('i');
        bar.style.width = `${100 * Number(bytes) / Number(whole)}%`;
        row.append(Object.assign(document.createElement('span'), {textContent: name}),
          Object.assign(document.createElement('b'), {textContent: gib(bytes)}), bar);
        return row;
      }));
  }

  function answer() {
    const box = document.getElementById('fits-answer');
    box.hidden = false;
    try {
      const [config, memory] = read(), top = fits.peak(data, config), fit = top.bytes <= memory;
      const safe = BigInt(Math.floor((1 - data.allowance) * Number(memory))), tight = fit && top.bytes > safe;
      box.dataset.fits = tight ? 'tight' : fit;
      show('fits-verdict', `${tight ? 'It is tight' : fit ? 'It fits' : 'It does not fit'}: ${gib(top.bytes)} at the peak, `
        + `${gib(fit ? memory - top.bytes : top.bytes - memory)} ${fit ? 'to spare' : 'too much'}.`);
      const where = top.layer === null ? '' : `, block ${top.layer + 1} of ${config.num_layers}`;
      show('fits-where', `The peak is in ${PHASES[top.phase]}${where}: ${top.operation}. `
        + `The model has ${many(Number(fits.parameterCount(config)))} parameters.`);
      const [context, batch] = ['context_length', 'batch_size'].map(name => [safe, memory].map(
        bytes => fits.largestThatFits(data, config, name, bytes).toLocaleString('en')));
      const free = `${Math.round(100 * data.allowance)}%`, both = ([leaves, all]) => `${leaves}, and ${all} with nothing left free`;
      show('fits-largest', `With ${free} left free the longest context at this batch is ${both(context)}; `
        + `the largest batch at this context is ${both(batch)}.`);
      bars(top.categories, top.bytes);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      delete box.dataset.fits;
      show('fits-verdict', error.message);
      ['fits-where', 'fits-largest'].forEach(id => show(id, ''));
      document.getElementById('fits-parts').replaceChildren();
    }
  }
  form.addEventListener('input', event => {
    const named = data.sizes[field('size').value];
    if (event.target === field('size') && named) shape.forEach(name => { field(name).value = named[name]; });
    if (shape.includes(event.target.name)) {
      const size = Object.entries(data.sizes).find(([, of]) => shape.every(name => of[name] === field(name).valueAsNumber));
      field('size').value = size ? size[0] : 'custom';
    }
    answer();
  });
  form.addEventListener('submit', event => event.preventDefault());
  answer();
})();
