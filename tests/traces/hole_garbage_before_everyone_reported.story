A controller starts while a payload waits in a store, and the gateway that wants it has not reported.
Rule: nothing is collected until all have reported, however long that takes.

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
    see k1 -> w0 Admit c1
    kill k1
    stop g0
    replace k
    never k2 -> s0 Release c0
    run 3000
    expect s0 tickets_committed == 1
    go g0
    see k2 -> w0 SwapIn c0
    allow
    finish
    expect w0 recomputed == 0
