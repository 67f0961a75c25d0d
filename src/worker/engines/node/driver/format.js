// The format of state entries: its constants, for encode.js and decode.js.
//
//   body   = 0x01 (format), tag, payload
//   tags     v one variable: how it is declared, tokens and objects      G a group: [name, declared]… and one set of objects
//            R member of a group: key of its leader, digest              s setting: JSON
//   token  = a primitive value, or the number of an object
//   object = kind, what its making needs, prototype, whether it can be extended, properties
//
// Objects are stored in the order of their discovery, not nested: depth and cycles cost nothing.
'use strict';

exports.FORMAT = 1;
exports.TOKEN = {
  UNDEFINED: 0, NULL: 1, TRUE: 2, FALSE: 3, INT: 4, FLOAT: 5, TEXT: 6, BIGINT: 7, SYMBOL_FOR: 8, WELLKNOWN_SYMBOL: 9, OBJECT: 10, NEGATIVE: 11, HOLE: 12,
};
exports.KIND = {
  PLAIN: 0, ARRAY: 1, DATE: 2, REGEXP: 3, MAP: 4, SET: 5, BOXED: 6, BUFFER: 7, TYPED: 8, VIEW: 9, ERROR: 10, FUNCTION: 11,
  VARIABLE: 12, WELLKNOWN: 13, MODULE: 14, SYMBOL: 15, URL: 16, SEARCH: 17, POOLED: 18, PROTOTYPE: 19, STANDIN: 20,
};
exports.PROTO = { DEFAULT: 0, NULL: 1, OBJECT: 2 };
// Attributes of a property; 7 is that of an assigned one.
exports.ATTRIBUTE = { ENUMERABLE: 1, CONFIGURABLE: 2, WRITABLE: 4, ACCESSOR: 8, SYMBOL_KEY: 16 };
exports.DECLARED = ['let', 'const', 'var', 'property'];
