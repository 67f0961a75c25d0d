__ryokan_o=$- __ryokan_f=0
\builtin set +xveuak
\builtin enable -n >&251
\builtin enable alias builtin cd command compgen complete declare dirs enable eval exec exit hash jobs local printf pushd read return set shift shopt source trap umask unalias unset
\builtin eval "$__ryokan_undo"
{
@DUMP@
} >&251; \builtin printf . >&241
\builtin unset -v __ryokan_r __ryokan_s __ryokan_o __ryokan_f __ryokan_l __ryokan_u __ryokan_disabled __ryokan_code __ryokan_undo __ryokan_bad
\builtin trap '' INT
