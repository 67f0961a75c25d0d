for __ryokan_i in 241 242 243 244 245 246 247 248 249 250 251 252 253 254; do
  __ryokan_n=10
  while [[ -e /proc/self/fd/$__ryokan_n ]]; do (( __ryokan_n++ )); done
  \builtin eval "{ exec $__ryokan_i<&$__ryokan_n; } $((__ryokan_i - 20))<&-; exec $((__ryokan_i - 20))<&-"
done
\builtin unset -v __ryokan_i __ryokan_n
\builtin shopt -s expand_aliases
