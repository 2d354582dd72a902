The request ends between Reserve and the copy, and then the controller dies.
Rule: reservations have an owner and expire by the store's ticks.

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
    hold k1 -> w0 SwapOut c0
    come c1
    see s0 -> k1 StoreReply c0 status=ok
    expect s0 tickets_reserved == 1
    kill k1
    abort c0
    leave c1
    run 4000
    expect s0 expired == 1
    expect s0 used_bytes == 0
    replace k
    finish
