// Encoding: values of user code to the bytes of a state entry, or the reason why not.
//
// Runs no user code: properties are read through their descriptors, proxies and getters are not
// touched. A value that would be restored as something else is refused, with the reason.
'use strict';

const brief = load('brief');
const functions = load('functions');
const modules = load('modules');
const wellknown = load('wellknown');
const { isExotic, isDetached, formOf } = load('values');
const { Writer } = load('bytes');
const { TOKEN, KIND, PROTO, ATTRIBUTE } = load('format');
const { types } = host;
const { inspect } = host.require('util');
const { intrinsics, prototypes } = host.user;
const { typed, view, arrayBuffer, sharedBuffer, href, searchText, mapEach, setEach, valueOfDate, unbox } = load('insides');

const PRIVATE = /#[\p{ID_Start}$_]/u;
const POOL_BYTES = intrinsics.Buffer.poolSize;

// Large arrays; and the gap of absent elements beyond which the others are listed one by one.
const LARGE = 512;
const GAP_MAX = 1000;

/** The value cannot be captured; the message is the reason. */
class Missed extends Error {}

/**
 * One entry's objects. `names`: Map of functions and classes to the top-level name that holds them; `classes`: of prototypes to
 * that name; `owners`: the names whose own definitions are in this entry.
 */
class Encoder {
  constructor({ names, classes }, owners) {
    this.names = names;
    this.classes = classes;
    this.owners = owners;
    this.out = new Writer();
    this.numbers = new Map();
    this.queue = [];
    this.shared = new Set(); // objects whose identity others may see
    this.pools = [];
    this.sources = []; // of the functions that it holds
    this.isAlways = false; // other threads may change it
    this.isForeign = false; // it holds values that may change elsewhere or refer to unseen values
    this.needs = new Set(); // top-level functions and classes that it refers to
  }

  /** Writes the collected objects and those that they contain. */
  objects() {
    for (let at = 0; at < this.queue.length; at++) this.object(this.queue[at]);
    return this.out.whole();
  }

  token(value) {
    const { out } = this;
    switch (typeof value) {
      case 'undefined': return out.byte(TOKEN.UNDEFINED);
      case 'boolean': return out.byte(value ? TOKEN.TRUE : TOKEN.FALSE);
      case 'number':
        if (Number.isInteger(value) && Math.abs(value) <= Number.MAX_SAFE_INTEGER && !Object.is(value, -0)) {
          out.byte(value < 0 ? TOKEN.NEGATIVE : TOKEN.INT);
          return out.count(Math.abs(value));
        }
        out.byte(TOKEN.FLOAT);
        return out.float(value);
      case 'string':
        out.byte(TOKEN.TEXT);
        return out.text(value);
      case 'bigint':
        out.byte(TOKEN.BIGINT);
        return out.text(value.toString(16));
      case 'symbol': return this.symbol(value);
      default:
        if (value === null) return out.byte(TOKEN.NULL);
        return this.reference(value);
    }
  }

  symbol(value) {
    const { out } = this;
    const registered = Symbol.keyFor(value);
    const path = wellknown.find(value);
    if (registered !== undefined) {
      out.byte(TOKEN.SYMBOL_FOR);
      return out.text(registered);
    }
    if (path !== undefined) {
      out.byte(TOKEN.WELLKNOWN_SYMBOL);
      return out.text(path[1]);
    }
    return this.reference(value);
  }

  reference(value) {
    let number = this.numbers.get(value);
    if (number === undefined) {
      number = this.queue.length;
      this.numbers.set(value, number);
      this.queue.push(value);
    }
    this.out.byte(TOKEN.OBJECT);
    this.out.count(number);
  }

  object(value) {
    const { out } = this;
    if (typeof value === 'symbol') {
      this.shared.add(value);
      out.byte(KIND.SYMBOL);
      const description = value.description;
      out.byte(description === undefined ? 0 : 1);
      return description === undefined ? undefined : out.text(description);
    }
    if (this.byName(value)) return undefined;
    if (types.isProxy(value)) throw new Missed('a Proxy cannot be captured');
    this.shared.add(value);
    if (typeof value === 'function') return this.callee(value);
    const form = formOf(value);
    if (form !== undefined) {
      out.byte(KIND.STANDIN);
      return out.text(JSON.stringify(form));
    }
    return this.body(value);
  }

  /** Objects saved by name, not by content. */
  byName(value) {
    const { out } = this;
    const name = this.names.get(value);
    if (name !== undefined && !this.owners.includes(name)) {
      this.needs.add(name);
      out.byte(KIND.VARIABLE);
      out.text(name);
      return true;
    }
    const maker = this.classes.get(value);
    if (maker !== undefined) {
      if (!this.owners.includes(maker)) this.needs.add(maker);
      out.byte(KIND.PROTOTYPE);
      out.text(maker);
      return true;
    }
    const path = wellknown.find(value);
    if (path !== undefined) {
      out.byte(KIND.WELLKNOWN);
      out.text(JSON.stringify(path));
      return true;
    }
    const module = typeof value === 'function' || modules.isModule(value) ? modules.find(value) : undefined;
    if (module !== undefined) {
      this.isForeign = this.isForeign || module.base !== null;
      out.byte(KIND.MODULE);
      out.text(JSON.stringify(module));
      return true;
    }
    return false;
  }

  callee(value) {
    const found = functions.analyse(value);
    if (found.reason !== undefined) throw new Missed(found.reason);
    if (found.form === 'class' && PRIVATE.test(found.source) && functions.hasPrivate(value)) throw new Missed('a class with static private members');
    this.sources.push(found.source);
    const { out } = this;
    out.byte(KIND.FUNCTION);
    out.text(JSON.stringify({ ...found, name: String(brief.own(value, 'name') ?? ''), comment: functions.comment(value) || undefined }));
    this.rest(value, null, found.form === 'class' ? isOfClass : isOfFunction(found));
    this.prototypeOf(value, found.form === 'class');
  }

  /** The prototype that came with a function: the code's additions, and its parents. */
  prototypeOf(value, isClass) {
    const { out } = this;
    const prototype = brief.own(value, 'prototype');
    if (typeof prototype !== 'object' || prototype === null || types.isProxy(prototype)) {
      out.byte(0);
      return;
    }
    if (types.isGeneratorFunction(value) && Reflect.ownKeys(prototype).length === 0) {
      out.byte(0);
      return;
    }
    this.shared.add(prototype);
    if (isClass) {
      out.byte(1);
      this.properties(prototype, Reflect.ownKeys(prototype).filter((key) => key !== 'constructor' && !isOfClassBody(key, prototype)));
      return;
    }
    const isUsual = brief.own(prototype, 'constructor') === value && Reflect.getPrototypeOf(prototype) === prototypes.Object;
    out.byte(isUsual ? 1 : 2);
    if (!isUsual) this.token(Reflect.getPrototypeOf(prototype));
    this.properties(prototype, Reflect.ownKeys(prototype).filter((key) => key !== 'constructor' || !isUsual));
  }

  body(value) {
    const { out } = this;
    let standard = 'Object';
    let skip = null;
    let isWhole = false;
    if (Array.isArray(value)) {
      standard = 'Array';
      out.byte(KIND.ARRAY);
      const taken = this.elements(value, brief.own(value, 'length'));
      isWhole = taken === brief.own(value, 'length') && hasOnlyElements(value, taken);
      skip = (key) => key === 'length' || isIndex(key, taken);
    } else if (types.isDate(value)) {
      standard = 'Date';
      out.byte(KIND.DATE);
      out.float(valueOfDate(value));
    } else if (types.isRegExp(value)) {
      standard = 'RegExp';
      out.byte(KIND.REGEXP);
      out.text(brief.regexpText(value));
      out.text(brief.flagsOf(value));
      this.token(brief.own(value, 'lastIndex'));
      skip = isLastIndex;
    } else if (types.isMap(value)) {
      standard = 'Map';
      this.map(value);
    } else if (types.isSet(value)) {
      standard = 'Set';
      this.set(value);
    } else if (types.isBoxedPrimitive(value)) {
      standard = this.boxed(value);
      if (standard === 'String') skip = isOfText(value);
    } else if (types.isAnyArrayBuffer(value)) {
      standard = this.buffer(value);
    } else if (types.isTypedArray(value)) {
      standard = this.typed(value);
      isWhole = hasOnlyElements(value, typed.length(value));
      skip = (key) => isIndex(key);
    } else if (types.isDataView(value)) {
      standard = 'DataView';
      out.byte(KIND.VIEW);
      this.reference(view.buffer(value));
      this.range(view.buffer(value), view.offset(value), view.bytes(value));
    } else if (types.isNativeError(value)) {
      standard = 'Error';
      out.byte(KIND.ERROR);
      this.token(stackOf(value));
      skip = isStack;
    } else if (isUrl(value)) {
      standard = 'URL';
      if (Reflect.ownKeys(value).some((key) => typeof key === 'string')) throw new Missed('a URL with properties of its own');
      out.byte(KIND.URL);
      out.text(href(value));
      return;
    } else if (isSearch(value)) {
      standard = 'URLSearchParams';
      out.byte(KIND.SEARCH);
      out.text(searchText(value));
      return;
    } else if (isExotic(value)) {
      throw new Missed(`${brief.typeName(value)} cannot be captured`);
    } else {
      out.byte(KIND.PLAIN);
    }
    this.checkChain(value, standard);
    this.rest(value, standard, skip, isWhole);
  }

  /** The number of plain elements before a special one or a long gap; the later ones are properties. */
  elements(value, length) {
    const { out } = this;
    out.count(length);
    let gap = 0;
    let taken = 0;
    for (let at = 0; at < length && gap <= GAP_MAX; at++) {
      const found = Reflect.getOwnPropertyDescriptor(value, at);
      if (found === undefined) {
        gap += 1;
        continue;
      }
      if (!found.writable || !found.enumerable || !found.configurable) break;
      taken = at + 1;
      gap = 0;
    }
    out.count(taken);
    for (let at = 0; at < taken; at++) {
      const found = Reflect.getOwnPropertyDescriptor(value, at);
      if (found === undefined) out.byte(TOKEN.HOLE);
      else this.token(found.value);
    }
    return taken;
  }

  map(value) {
    const items = [];
    mapEach(value, (item, key) => items.push(key, item));
    this.out.byte(KIND.MAP);
    this.out.count(items.length);
    for (const each of items) this.token(each);
  }

  set(value) {
    const items = [];
    setEach(value, (item) => items.push(item));
    this.out.byte(KIND.SET);
    this.out.count(items.length);
    for (const each of items) this.token(each);
  }

  boxed(value) {
    const [name, get] = unbox.find(([, , is]) => is(value));
    this.out.byte(KIND.BOXED);
    this.token(get(value));
    return name;
  }

  buffer(value) {
    const isShared = types.isSharedArrayBuffer(value);
    if (isShared) this.isForeign = this.isAlways = true;
    const of = isShared ? sharedBuffer : arrayBuffer;
    if (!isShared && isDetached(value)) throw new Missed('an ArrayBuffer that was transferred away');
    const grows = isShared ? sharedBuffer.growable(value) : arrayBuffer.resizable(value);
    this.out.byte(KIND.BUFFER);
    this.out.byte((isShared ? 1 : 0) | (grows ? 2 : 0));
    if (grows) this.out.count(of.most(value));
    this.out.raw(new Uint8Array(value));
    return isShared ? 'SharedArrayBuffer' : 'ArrayBuffer';
  }

  typed(value) {
    const isBuffer = Reflect.getPrototypeOf(value) === prototypes.Buffer;
    const name = isBuffer ? 'Buffer' : typed.tag(value);
    const buffer = typed.buffer(value);
    if (isBuffer && types.isArrayBuffer(buffer) && arrayBuffer.bytes(buffer) === POOL_BYTES && typed.bytes(value) < POOL_BYTES) {
      this.pooled(value, buffer);
      return name;
    }
    this.out.byte(KIND.TYPED);
    this.out.text(name);
    this.reference(buffer);
    this.range(buffer, typed.offset(value), typed.length(value));
    return name;
  }

  /** Small Buffers share a pool: only their own bytes are saved. */
  pooled(value, buffer) {
    const start = typed.offset(value);
    const end = start + typed.bytes(value);
    for (const other of this.pools) {
      if (other.buffer === buffer && start < other.end && other.start < end) throw new Missed('a small Buffer that shares its bytes with another');
    }
    this.pools.push({ buffer, start, end });
    this.out.byte(KIND.POOLED);
    this.out.raw(new Uint8Array(buffer, start, end - start).slice());
  }

  range(buffer, offset, length) {
    const grows = types.isSharedArrayBuffer(buffer) ? sharedBuffer.growable(buffer) : arrayBuffer.resizable(buffer);
    if (grows) throw new Missed('a view of a buffer that can be resized');
    this.out.count(offset);
    this.out.count(length);
  }

  /** Prototype, extensibility and properties; none of these if `isWhole`. */
  rest(value, standard, skip, isWhole = false) {
    const { out } = this;
    const above = Reflect.getPrototypeOf(value);
    const usual = standard === null ? undefined : prototypes[standard];
    if (standard === null) out.byte(PROTO.DEFAULT); // a function's prototype follows from its source
    else if (above === null) out.byte(PROTO.NULL);
    else if (above === usual) out.byte(PROTO.DEFAULT);
    else {
      out.byte(PROTO.OBJECT);
      this.token(above);
    }
    out.byte(Reflect.isExtensible(value) ? 1 : 0);
    const keys = isWhole ? [] : Reflect.ownKeys(value);
    this.properties(value, skip === null ? keys : keys.filter((key) => !skip(key, value)));
  }

  properties(value, keys) {
    const { out } = this;
    out.count(keys.length);
    for (const key of keys) {
      const found = Reflect.getOwnPropertyDescriptor(value, key);
      const isData = Object.hasOwn(found, 'value');
      let attributes = (found.enumerable ? ATTRIBUTE.ENUMERABLE : 0) | (found.configurable ? ATTRIBUTE.CONFIGURABLE : 0);
      attributes |= isData ? (found.writable ? ATTRIBUTE.WRITABLE : 0) : ATTRIBUTE.ACCESSOR;
      if (typeof key === 'string') {
        out.byte(attributes);
        out.text(key);
      } else {
        out.byte(attributes | ATTRIBUTE.SYMBOL_KEY);
        this.token(key);
      }
      if (isData) this.token(found.value);
      else {
        this.token(found.get);
        this.token(found.set);
      }
    }
  }

  /** Checks that an object's class is known and that it has no unreadable state. */
  checkChain(value, standard) {
    let above = Reflect.getPrototypeOf(value);
    let asked = false;
    let known; // the top-level class that restores the rest of the chain
    for (let steps = 0; above !== null && above !== prototypes[standard] && above !== prototypes.Object; steps++) {
      if (steps > 100 || types.isProxy(above)) throw new Missed('a prototype that is a Proxy');
      const maker = brief.own(above, 'constructor');
      known = this.classes.get(above) ?? (known !== undefined && isLocal(maker, above) ? known : undefined);
      if (known !== undefined) {
        if (!asked && typeof maker === 'function' && !types.isProxy(maker) && PRIVATE.test(brief.functionText(maker))) {
          asked = true;
          if (functions.hasPrivate(value)) throw new Missed(`an instance of ${known}, which has private members`);
        }
      } else if (standard !== 'Error' || !isErrorPrototype(above)) {
        refuseUnknown(value, above);
      }
      above = Reflect.getPrototypeOf(above);
    }
  }
}

/** A class without a top-level name: the source of a derived class rebuilds it. */
function isLocal(maker, above) {
  return typeof maker === 'function' && !types.isProxy(maker) && wellknown.find(above) === undefined && modules.find(maker) === undefined
    && !/\[native code\]/.test(brief.functionText(maker));
}

/** A prototype of no top-level class: allowed for a user's object, not for the prototype of another class. */
function refuseUnknown(value, above) {
  const maker = brief.own(above, 'constructor');
  const isMade = typeof maker === 'function' && !types.isProxy(maker) && brief.own(maker, 'prototype') === above;
  if (!isMade && wellknown.find(above) === undefined) return;
  const name = (isMade && brief.own(maker, 'name')) || brief.typeName(value);
  throw new Missed(`an instance of ${name}, which is no class that is declared at the top level now`);
}

const errorPrototypes = new Set(Object.keys(prototypes).filter((name) => name.endsWith('Error')).map((name) => prototypes[name]));
const isErrorPrototype = (value) => errorPrototypes.has(value);

function stackOf(error) {
  const found = Reflect.getOwnPropertyDescriptor(error, 'stack');
  if (found === undefined) return undefined;
  if (Object.hasOwn(found, 'value')) return typeof found.value === 'string' ? found.value : undefined;
  const isNative = typeof found.get === 'function' && /\[native code\]/.test(brief.functionText(found.get));
  const text = isNative ? Reflect.apply(found.get, error, []) : undefined;
  return typeof text === 'string' ? text : undefined;
}

function isUrl(value) {
  return Reflect.getPrototypeOf(value) === prototypes.URL && succeeds(() => href(value));
}

function isSearch(value) {
  return Reflect.getPrototypeOf(value) === prototypes.URLSearchParams && succeeds(() => searchText(value));
}

function succeeds(inner) {
  try {
    inner();
    return true;
  } catch {
    return false;
  }
}

/** Whether a large array has no properties beside its elements: listing all names would be slow. */
function hasOnlyElements(value, length) {
  if (length < LARGE) return false;
  const text = inspect(value, { maxArrayLength: 0, depth: 0, customInspect: false, breakLength: Infinity, compact: true });
  return /^(?:[\w$]+\(\d+\) )?(?:\[[\w$]+\] )?\[ ?\.\.\. \d+ more items? ?\]$/.test(text);
}

const isLastIndex = (key) => key === 'lastIndex';
const isStack = (key, value) => key === 'stack' && stackOf(value) !== undefined;
const isIndex = (key, below = Infinity) => typeof key === 'string' && /^(0|[1-9]\d*)$/.test(key) && Number(key) < below;
const isOfText = () => (key) => key === 'length' || isIndex(key);
const isOfFunction = (found) => (key, value) => {
  if (key === 'name') return true; // kept with the source
  if (key === 'prototype') return found.form === 'expression' || found.form === 'member';
  if (key === 'length') return Reflect.getOwnPropertyDescriptor(value, key).writable === false;
  return key === 'arguments' || key === 'caller';
};
/** The source contains static methods, but not assignments and fields. */
const isOfClass = (key, value) => ['name', 'prototype', 'length'].includes(key) || isOfClassBody(key, value);
const isOfClassBody = (key, value) => {
  const found = Reflect.getOwnPropertyDescriptor(value, key);
  return !found.enumerable && (typeof found.value === 'function' || !Object.hasOwn(found, 'value'));
};

Object.assign(exports, { Encoder, Missed });
