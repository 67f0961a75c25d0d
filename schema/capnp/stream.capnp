@0x86c366a91393f3f8;
# What `-> stream` refers to: Cap'n Proto's standard file, reduced to its one type (same ids), so that `schema/` is all that
# a client in any language needs on its import path.

struct StreamResult @0x995f9a3377c0b16e {}
