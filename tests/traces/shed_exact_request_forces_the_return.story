An exact request that comes while the planes are away waits for them: what is in the tail moves, or
is swapped out, the planes return, and only then does it take a step. Nobody loses a token.

given
    block size 2
    worker w0 blocks 6 tail 4 return 50 step 20
    store s0 budget 16
    gateway g0
    set levels 2
    client c0 prompt 4 max 14
    client c1 prompt 2 max 4 exact true
    set reserve_slack_tokens 8

story
    come c0
    see w0 hears PlanesShed
    run 100
    come c1
    see k1 -> w0 Admit c1
    never w0 -> g0 Tokens c1
    see w0 -> g0 Attach c1
    see w0 hears PlanesRestored
    allow
    expect w0 planes == held
    expect w0 has c1 prefill
    see w0 -> g0 Tokens c1 index=0
    finish
    expect c0 tokens == 14
    expect c1 tokens == 4
    expect w0 sheds >= 1
