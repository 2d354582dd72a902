A worker is stopped for so long that it is taken for dead; its request goes on elsewhere; then it
wakes up and sends the token it had just computed. Two runs speak for one request, and their tokens
differ.
Rule: once a higher run has attached, what a lower one says is dropped, and it is told to stop.

given
    block size 2
    worker w0 blocks 10 step 20
    worker w1 blocks 8 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 4 max 8
    set noisy true

story
    come c0
    see w0 -> g0 Tokens c0 index=1
    stop w0
    see w1 -> g0 Attach c0
    go w0
    see w0 -> g0 Tokens c0 index=2
    see g0 -> w0 Drop c0
    expect w0 lacks c0
    finish
    expect c0 tokens == 8
