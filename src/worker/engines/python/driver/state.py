"""Saving: after an execution, the entries whose bytes changed, and the list of what cannot be saved.

Owns a record per entry: the last sent form, and whether the value can change without a mention of its name (see
aliasing). Inspects only what the execution can have changed (see effects). Never raises.
"""
from _ryokan import aliasing, brief, definitions, effects as effects_of, entries, gate, groups, jobs, run, settings
from _ryokan import streams, wire

IMMUTABLE, UNALIASED, ALIASED = aliasing.IMMUTABLE, aliasing.UNALIASED, aliasing.ALIASED
_CHUNK = wire.TAIL_MAX

records = {}
_settings_sent = {}
_missed = {}
_missed_sent = []
# Threads of the last execution's end may have changed things since, even if they have ended.
_threads_ran = False


class Record:
    """The record of a saved or missed entry. `identity` is the object's id: no reference is kept."""

    __slots__ = ("key", "digest", "identity", "aliasing", "grouped")


def is_hidden(name, obj):
    """Names that are not part of the state."""
    return type(name) is not str or name.startswith("__") and name.endswith("__") or run.is_history(name)


def forget():
    global _missed_sent
    records.clear()
    _missed.clear()
    entries.imported.clear()
    _settings_sent.clear()
    _missed_sent = []


def after(effects):
    """Posts the changes of an execution."""
    global _threads_ran
    threads = _threads_ran or jobs.any_threads()
    if threads:
        _threads_ran = jobs.any_threads()
        if effects.trivial:
            effects = effects_of.of_call()
    elif effects.trivial:
        return
    entries.imported.update(effects.imports)
    harmless = effects.harmless and not threads
    if harmless and any(getattr(records.get(name), "grouped", False) for name in effects.stored):
        harmless = False
    _update(effects, harmless, False, False)


def rehearse(effects):
    """Looks at an execution's changes and posts nothing."""
    _update(effects, effects.harmless, False, True)


def everything(resend):
    """Posts every entry (`resend`), or treats the current state as saved, as after a load."""
    _update(None, False, resend, not resend)


def _update(effects, harmless, resend, adopt):
    _, error = gate.guard(_prepare, effects, harmless)
    items = _prepared
    if error is None and len(items) > 1:
        groups.join(items)
    for item in items:
        if item.parts is not None or item.missed is not None:
            _finish(item, resend, adopt)
    _drop_gone(effects.stored if harmless else None, adopt)
    if not harmless:
        _settings(resend, adopt)
    _report_missed(adopt)
    items.clear()


_prepared = []


def _prepare(effects, harmless):
    """Selects the entries to inspect, and encodes them."""
    _prepared.clear()
    with streams.Silence():
        for slot, key, attributes in _candidates(effects, harmless):
            item = entries.Item(slot, key, attributes)
            _prepared.append(item)
            try:
                entries.encode(item)
            except BaseException as error:  # user code may define __reduce__: it may exit, and be interrupted
                item.parts = item.memo = None
                item.missed = entries.reason(error)


def _candidates(effects, harmless):
    """[(slot, key, attributes of a class)]: no reference to an object, because references will be counted."""
    space = run.namespace
    names = effects.stored if harmless else list(space)
    found = []
    for name in names:
        if name not in space:
            continue
        obj = space[name]
        if is_hidden(name, obj):
            continue
        record = records.get(name)
        if record is not None and effects is not None and not effects.everything and record.identity == id(obj):
            if record.aliasing == IMMUTABLE and name not in effects.stored:
                continue
            if record.aliasing == UNALIASED and name not in effects.touched:
                continue
        if isinstance(obj, type) and obj.__module__ == "__main__" and obj.__qualname__ == name:
            # First, because saving an instance checks whether its class is known.
            known = definitions.class_source(name, obj) is not None
            found.append((name, "class/" + name, None))
            attributes = entries.attributes_of(obj) if known else None
            if attributes:
                found.append((name + "\0", "classattr/" + name, attributes))
        else:
            found.append((name, entries.key_of(name, obj), None))
    return found


def _finish(item, resend, adopt):
    """Posts the entry if its bytes changed, and updates the record."""
    record = records.get(item.slot)
    if record is None:
        record = records[item.slot] = Record()
        record.key = record.digest = None
    if record.key != item.key and record.digest is not None:
        if not adopt:
            wire.post({"ev": "del", "key": record.key})
        record.digest = None
    record.key, record.aliasing, record.grouped = item.key, item.aliasing, item.grouped
    record.identity = id(item.obj)
    if item.missed is not None:
        record.aliasing = UNALIASED  # tried again when touched
        if record.digest is not None:
            if not adopt:
                wire.post({"ev": "del", "key": item.key})
            record.digest = None
        _missed[item.slot] = {"key": item.key, "type": brief.type_name(type(item.obj)), "reason": item.missed}
        return
    _missed.pop(item.slot, None)
    digest = entries.digest_of(item.parts)
    if digest != record.digest or resend:
        record.digest = digest
        if not adopt:
            send(item.key, item.obj, item.parts)


def send(key, obj, parts, type_name=None):
    """Posts an entry in chunks."""
    summary, error = gate.guard(brief.line, obj)
    meta = {"type": type_name or brief.type_name(type(obj)), "summary": summary if error is None else ""}
    tag, payload = parts
    head = entries.FORMAT + tag
    view = memoryview(payload)
    first = _CHUNK - len(head)
    more = len(view) > first
    wire.post({"ev": "put", "key": key, "meta": meta, "more": more}, head + bytes(view[:first]))
    for at in range(first, len(view), _CHUNK):
        more = at + _CHUNK < len(view)
        wire.post({"ev": "put", "key": key, "meta": meta, "more": more}, bytes(view[at : at + _CHUNK]))


def _drop_gone(names, adopt):
    """Names that were deleted: among `names`, or all."""
    space = run.namespace
    slots = list(records) if names is None else [slot for name in names for slot in (name, name + "\0")]
    for slot in slots:
        record = records.get(slot)
        name = slot.rstrip("\0")
        if record is None or name in space and slot == name and not is_hidden(name, space[name]):
            continue
        if slot != name and name in space and records[name].key.startswith("class/"):
            continue
        del records[slot]
        _missed.pop(slot, None)
        if record.digest is not None and not adopt:
            wire.post({"ev": "del", "key": record.key})


def _settings(resend, adopt):
    found, error = gate.guard(settings.current)
    if error is not None:
        return
    for key, (obj, kind) in found.items():
        known = _settings_sent.get(key)
        if known is not None and not resend and key != "random/numpy" and known[0] == obj:
            continue
        body = bytes(entries.dump(obj)[0])
        if known is None or known[1] != body or resend:
            _settings_sent[key] = (obj, body)  # `obj` is a private copy
            if not adopt:
                send(key, obj, (b"v", body), kind)
    for key in [key for key in _settings_sent if key not in found]:
        del _settings_sent[key]
        if not adopt:
            wire.post({"ev": "del", "key": key})


def _report_missed(adopt):
    global _missed_sent
    if (_missed or _missed_sent) and not adopt:
        missed = list(_missed.values())
        if missed != _missed_sent:
            _missed_sent = missed
            wire.post({"ev": "missed", "entries": missed})


def report_again():
    """Posts the list of what cannot be saved again, after init received an outdated one."""
    wire.post({"ev": "missed", "entries": _missed_sent})
