An answer is begun in FP8. Its worker is killed, and so is its gateway; what the client has is taken
for the truth by the next one, modes and all, and each token counts once in the mode in which it was
sent (the client's own count is held against the sum).

given
    block size 4
    worker w0 blocks 8 step 20
    worker w1 blocks 8 step 20
    store s0 budget 8
    gateway g0
    gateway g1
    client c0 prompt 5 max 12
    set levels 2
    set precision fp8

story
    come c0
    see w0 -> g1 Tokens c0 index=4
    run 30
    kill w0
    see w1 -> g1 Tokens c0
    kill g1
    see g0 -> c0 Accepted
    see w1 -> g0 Tokens c0
    expect c0 tokens >= 5
    finish
    expect c0 tokens == 12
