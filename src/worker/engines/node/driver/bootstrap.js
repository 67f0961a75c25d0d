// The text given to `node -e`: reads the driver's modules from descriptor 4 and starts it. First comes the length of reserved
// bytes (8 bytes, little-endian) and those bytes, which are skipped, then the sources as one JSON object {"module name": "source"}.
//
// The driver has its own realm: user changes to Array.prototype or JSON do not affect it. Only
// `realm` is compiled in the user's realm, to create objects there. Modules are compiled at their
// first use.
{
  const fs = require('fs');
  const vm = require('vm');

  const readDriver = () => {
    const pieces = [];
    for (;;) {
      const piece = Buffer.alloc(1 << 18);
      const got = fs.readSync(4, piece);
      if (!got) break;
      pieces.push(piece.subarray(0, got));
    }
    fs.closeSync(4);
    const whole = Buffer.concat(pieces);
    return JSON.parse(whole.toString('utf8', 8 + Number(whole.readBigUInt64LE(0))));
  };

  /** Node's stderr message about waiting for a debugger, which it takes the listener for. */
  const exitQuietly = (exit) => (status) => {
    fs.closeSync(2);
    exit(status);
  };

  /** Node's own bindings, without warnings about their use. */
  const quietly = (inner) => {
    const was = process.emitWarning;
    process.emitWarning = () => {};
    try {
      return inner();
    } finally {
      process.emitWarning = was;
    }
  };
  const processBinding = process.binding.bind(process);
  const binding = (name) => quietly(() => processBinding(name));

  /** A binding that some versions expose only with `--expose-internals`. */
  const internal = (name) => {
    try {
      return binding(name);
    } catch {
      return quietly(() => require('internal/test/binding').internalBinding(name));
    }
  };

  const start = () => {
    const sources = readDriver();
    const realm = vm.createContext(Object.create(null), { name: 'ryokan' });
    // Globals of a `vm` realm are slow to access: modules receive them as parameters.
    const given = vm.runInContext('({ names: Object.getOwnPropertyNames(globalThis).filter((name) => /^[A-Z]/.test(name)) })', realm);
    given.values = vm.runInContext(`[${given.names}]`, realm);
    const loaded = Object.create(null);
    const host = {
      process,
      require,
      sources,
      types: Object.assign(Object.create(null), require('util').types),
      exit: exitQuietly(process.reallyExit.bind(process)),
      binding,
      internal,
      realm: { context: realm, names: given.names, values: given.values, compileFunction: vm.compileFunction },
      importModule: (specifier, options) => (options === undefined ? import(specifier) : import(specifier, options)),
    };
    const load = (name) => {
      if (loaded[name] === undefined) {
        const module = (loaded[name] = { exports: {} });
        const parameters = ['module', 'exports', 'load', 'host'];
        const values = [module, module.exports, load, host];
        const filename = 'ryokan:' + name;
        // Objects for the user's realm are compiled there.
        if (name === 'realm') vm.compileFunction(sources[name], parameters, { filename })(...values);
        else vm.compileFunction(sources[name], parameters.concat(given.names), { filename, parsingContext: realm })(...values, ...given.values);
      }
      return loaded[name].exports;
    };
    host.user = load('realm');
    load('main').start();
  };
  start();
}
