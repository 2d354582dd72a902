Two clients send the very same request.
Rule: ids and resume keys are minted by the gateway, so neither can name the other's.

given
    block size 2
    worker w0 blocks 8 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 4 shared 4 max 6
    client c1 prompt 4 shared 4 max 6

story
    come c0 c1
    see w0 -> g0 Tokens c0 index=0
    expect c0 request == g0.1-1
    expect c1 request == g0.1-2
    abort c1
    finish
    expect c0 tokens == 6
    expect c0 succeeded == true
