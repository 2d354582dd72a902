An abort arrives while the request waits in the store.

given
    block size 8
    worker w0 blocks 3 step 20 copy 30
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w0 Admit c1
    expect s0 tickets_committed == 1
    never k1 -> w0 SwapIn c0
    abort c0
    run 1000
    expect s0 used_bytes == 0
    finish
    expect c0 failure == aborted
    expect c1 tokens == 6
