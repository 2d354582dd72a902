Controller 1 sends an admission to w0 and dies before w0 has it. Controller 2 hears that w0 has
nothing and admits on w1; then the first order arrives, at a worker that knows of epoch 2.
Rule: orders below the highest controller epoch are refused.

given
    block size 2
    worker w0 blocks 8 step 20
    worker w1 blocks 6 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 4 max 6

story
    hold k1 -> w0 Admit c0
    come c0
    run 100
    kill k1
    stop w0
    replace k
    see k2 -> w1 Admit c0
    see w1 -> g0 Tokens c0
    go w0
    see k2 -> w0 ReportReply
    never w0 -> g0 Attach c0
    release
    see k1 -> w0 Admit c0
    run 50
    expect w0 lacks c0
    expect w0 orders_refused == 1
    finish
    expect c0 tokens == 6
