A worker is killed while it decodes: another attaches, and the stream goes on behind the tokens
that the gateway holds.

given
    block size 2
    worker w0 blocks 8 step 20
    worker w1 blocks 6 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 4 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=1
    kill w0
    see k1 -> w1 Admit c0
    see w1 -> g0 Tokens c0
    start w0
    finish
    expect c0 tokens == 6
