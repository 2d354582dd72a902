The copy back fails: the planes stay away, the tail is open again, and the copy is tried again later
and later. The exact request that wants it finishes in the end.

given
    block size 2
    worker w0 blocks 6 tail 4 return 50 step 20 fails 1
    store s0 budget 16
    gateway g0
    set levels 2
    client c0 prompt 4 max 12
    client c1 prompt 2 max 4 exact true

story
    come c0
    see w0 hears PlanesShed
    come c1
    see w0 hears PlanesRestored ok=false
    expect w0 planes == open
    see w0 hears PlanesRestored ok=false
    never w0 -> g0 Tokens c1
    run 100
    expect w0 planes_return_failures == 2
    allow
    finish
    expect c0 tokens == 12
    expect c1 tokens == 4
    expect w0 planes_returns >= 1
