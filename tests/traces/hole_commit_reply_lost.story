The commit ran, its answer is lost.
Rule: the worker asks (Resolve), hears COMMITTED, and only then frees its blocks.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see s0 -> w0 StoreReply c0 status=ok
    lose s0 -> w0 StoreReply c0
    see w0 -> s0 Commit c0
    run 100
    expect w0 has c0 swapping_out
    see w0 -> s0 Resolve c0
    see s0 -> w0 StoreReply c0 status=committed
    expect w0 lacks c0
    finish
    expect w0 requests_resumed_total == 1
