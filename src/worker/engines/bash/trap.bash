__ryokan_u==
trap() {
  \builtin trap "$@" || \builtin return
  case $BASHPID in $$) ;; *) \builtin return 0 ;; esac
  case ${1-} in
    --) \builtin shift ;;
    -) ;;
    -*) \builtin return 0 ;;
  esac
  case $# in
    0) \builtin return 0 ;;
    1) \builtin set -- - "$1" ;;
  esac
  \builtin local __ryokan_i __ryokan_a
  __ryokan_a=$1
  \builtin shift
  for __ryokan_i; do
    case $__ryokan_i in
      EXIT | exit | SIGEXIT | 0)
        case $__ryokan_a in
          -) __ryokan_u=- __ryokan_a= ;;
          *) __ryokan_u=+$__ryokan_a ;;
        esac
        \builtin trap -- @BEFORE@"$__ryokan_a"@AFTER@ EXIT ;;
    esac
  done
}
\builtin declare -ft trap
