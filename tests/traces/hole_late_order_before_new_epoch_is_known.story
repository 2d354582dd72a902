The same, but the first order reaches w0 before w0 has heard of controller 2: the call of a killed
caller still runs. Both workers now speak for the request.
Rule: the gateway lets the highest run speak and refuses every lower one.

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
    hold k2 -> w0 ReportReply
    go w0
    never w0 -> g0 Tokens c0
    release
    see w0 -> g0 Attach c0
    see g0 -> w0 AttachRefused c0
    run 50
    expect w0 lacks c0
    finish
    expect c0 tokens == 6
