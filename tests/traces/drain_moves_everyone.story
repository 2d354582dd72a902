A drained worker's residents go on elsewhere, KV and all.

given
    block size 2
    worker w0 blocks 8 step 20
    worker w1 blocks 8 step 20
    store s0 budget 16
    gateway g0
    client c0 prompt 4 max 10

story
    come c0
    see w0 -> g0 Tokens c0 index=1
    drain w0
    see k1 -> w0 SwapOut c0
    see k1 -> w1 SwapIn c0
    see w1 hears FetchDone status=ok
    expect w0 lacks c0
    finish
    expect c0 tokens == 10
    expect w1 recomputed == 0
