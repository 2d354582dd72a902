The commit is under way; the worker waits in vain, asks, and is told that nothing was committed;
then the commit arrives.
Rule: Resolve seals the ticket, so that a late Commit fails and nobody owns a second copy.

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
    hold w0 -> s0 Commit c0
    come c1
    see k1 -> w0 SwapOut c0
    see w0 -> s0 Resolve c0
    see s0 -> w0 StoreReply c0 status=sealed
    expect w0 has c0 decode
    expect w0 kv_cpu_offload_failed_total == 1
    release
    see w0 -> s0 Commit c0
    see s0 -> w0 StoreReply c0 status=sealed
    expect s0 tickets_committed == 0
    finish
    expect c0 tokens == 6
