"""L3 below the host tier: one small interface, `file`, the embedded default, and `mooncake`.

    Run, Identity, Form      page.py      neighbouring pages of one namespace; what must agree; headers and checks
    HostPages, Piece         host.py      where the bytes of a host slot lie
    Store, Put, Got, Stats   store.py     the interface
    FileStore                file.py      (order.py, catalog.py, disk.py)
    MooncakeStore            mooncake.py  (mooncake_process.py, which alone loads the client; mooncake_words.py)
    build_store              build.py     what `[storage]` asks for
    Engine, Done, Counters   engine.py    the threads: what the daemon's loop talks to

The daemon makes an `Identity` (with `payload_bytes` of a page in all local shards) and `HostPages` (with the pools'
memfds, which Mooncake's process maps), and of these a store by `build_store`. It calls `open()`: a file store of 10^5
pages takes about a second of work, five if its index is lost; ConfigError or NotInstalled where the operator has to do
something; that a Mooncake master is away is no error. Then `Engine(store, done)` owns the store, and closes it with
itself. All calls of `Engine` but close return at once:

    probe(ticket, run)          ->  Done.num_pages: leading pages there (exact stores: from memory)
    fetch(ticket, run, slots)   ->  Done.num_pages: leading pages whose bytes are right in their slots
    store(ticket, run, slots)   ->  Done.mask: a byte a page, 1: it is there now; Done.removed: what went for it
    clear(ticket)               ->  Done.removed: all that was there
    cancel(ticket)              the completion comes as ever: within the call if the work had not begun
    close(deadline_s)           False if a thread hangs; the daemon may end all the same. It waits, so call it last
    queued(), counters          for /metrics; so is Store.stats(), from any thread

Tickets are ints >= 0 of the caller's, each used once at a time; slots are packed int32, one a page. `done` is called
once for each ticket, on a storage thread or within `cancel` and `close`, and must not wait: `call_soon_threadsafe`.
Beside these there are completions of kind "discard" with ticket NO_TICKET: a page found bad was thrown away.

Laws. A page that is wrong, short, foreign, damaged or not to be read is a miss with a reason, never an error, and costs
itself alone. What a fetch says is right was checked against the tokens, namespace, digest, the page before, identity
and the hash of its bytes; slots from `num_pages` on may hold anything. No slot is touched after its completion.
Completions come in the order of an exact store's changes: apply `removed`, then `mask`, of each as it comes, whatever
its kind, and the result is what the store holds. Its pages are closed under the page before: a store of a run behind a
page that is not there has reason "orphan"; what evicts takes children first; only a bad page goes from under its
children, which stay, and are swept at the next open if it has not come back. `Store.listing()` of an exact store tells
of all pages, parents first, from any thread at any time. Mooncake's is not exact: it removes without telling, a mask
says what a put found or did, and `removed` and `listing` are empty. `Done.error` is set only for a call that can't be
meant (BadRequest), for what a closed engine leaves (ClosedError), and for our own mistakes (StorageError).

A payload is the pieces of `HostPages` in their order, so it need not say how the host's pool lies: with the same order
of shards, layers and planes, what was stored from page_first is fetched into layer_first, and `Identity.layout` is that
of the payload. A fetch runs on one thread: who wants more at once cuts a long run into several.
"""
