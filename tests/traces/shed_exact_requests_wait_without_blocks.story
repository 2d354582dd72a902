Two exact requests are let in while the tail is open, the second after a copy back has failed, and
together hold more than the ordinary blocks. Neither can take a step before the planes are back, nor
has any KV to swap out: they give back the blocks that they do not need yet.

given
    block size 2
    worker w0 blocks 3 tail 8 return 30 step 20 fails 1
    store s0 budget 16
    gateway g0
    set levels 2
    client c0 prompt 4 max 6
    client c1 prompt 3 max 2 exact true
    client c2 prompt 3 max 2 exact true

story
    come c0
    see w0 hears PlanesShed
    see w0 -> g0 Tokens c0 index=5
    come c1
    see w0 hears PlanesRestored ok=false
    come c2
    see k1 -> w0 Admit c2
    see w0 hears PlanesRestored ok=false
    expect w0 blocks_held == 0
    finish
    expect c0 tokens == 6
    expect c1 tokens == 2
    expect c2 tokens == 2
