@GUARD@
\builtin set +xveuak
\builtin trap - HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM CHLD CONT TSTP TTIN TTOU URG VTALRM PROF WINCH
\builtin printf '\0@MARK@N\0' >&251; \builtin printf . >&241
\builtin shopt -u execfail
\command exec <&253
\command exec -c -a bash @BASH@ 221>/proc/self/fd/241 222>/proc/self/fd/242 223>/proc/self/fd/243 224</proc/self/fd/244 225</proc/self/fd/245 226</proc/self/fd/246 227</proc/self/fd/247 228</proc/self/fd/248 229</proc/self/fd/249 230</proc/self/fd/250 231>>/proc/self/fd/251 232</proc/self/fd/252 233</proc/self/fd/253 234>/proc/self/fd/254
