A store restarts while a worker still writes into the slab of its earlier life.
Rule: a new life of the store aborts the put; nothing of the old life is committed in the new one.

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
    see s0 -> w0 PutGrant c0
    kill s0
    start s0
    see w0 hears PutDone ok=false
    expect w0 has c0 decode
    expect s0 tickets_committed == 0
    finish
    expect c0 tokens == 6
    expect c1 tokens == 6
